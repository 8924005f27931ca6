"""The memory of requests: checkpoints of their steps, and how long ended requests can be found."""

import asyncio
import gc
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.errors import CancelledRequestError, ExistsError, InternalError, StagemeshError, UnavailableError
from stagemesh.common.notification import Notifier
from stagemesh.orchestrator.admission.admission import Admission
from stagemesh.orchestrator.admission.queue import AdmissionRequest
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.step_stream import TakeEvent
from stagemesh.orchestrator.planning.checkpoint_budget import CheckpointBudget
from stagemesh.orchestrator.planning.planner import Plan, PlannedStep, Planner
from stagemesh.orchestrator.planning.replacement_replicas import ReplacementReplicas
from stagemesh.orchestrator.request.failures import Failures
from stagemesh.orchestrator.request.lifecycle import PlanRuns, RequestLifecycle, RequestRegistry
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.orchestrator.request.recovery import StepState
from stagemesh.orchestrator.request.run import RequestRun
from stagemesh.orchestrator.request.step_calls import StepCalls
from stagemesh.orchestrator.request.streamed_input import InputPlanes
from stagemesh.orchestrator.request.validation import ValidRequest, validate
from stagemesh.pipeline import Limits
from stagemesh.pipeline.graph import Route
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.v1 import orchestrator_pb2, request_pb2, stage_pb2, tensor_pb2
from tests.orchestrator.mesh import Mesh, load, mesh
from tests.orchestrator.scripted_stage import failing

LIMITS = Limits(max_in_flight=1, max_in_flight_bytes=1 << 30, max_queued=1, max_queued_bytes=1 << 30)
REPLACEMENTS = ReplacementReplicas(cast("Planner", None))
"""In these tests no stage is placed again."""


def _request() -> ValidRequest:
    return ValidRequest("r", request_pb2.Input(), request_pb2.Parameters(), ())


def _life(request_id: str = "r", *, admission: Admission | None = None, size_bytes: int = 0) -> RequestLifecycle:
    record = RequestRecord()
    record.size_bytes = size_bytes
    return RequestLifecycle(
        record,
        fingerprint=b"content",
        seed=7,
        admission=admission or Admission(LIMITS),
        admission_request=AdmissionRequest(request_id),
        replacements=REPLACEMENTS,
        facts={},
        input_planes=InputPlanes("p"),
    )


def _nothing_to_do(runs: int) -> list[Plan]:
    return [Plan({}, Route((), (), {})) for _ in range(runs)]


def _no_replica(runs: int) -> list[Plan]:
    raise UnavailableError("no replica")


async def _run(life: RequestLifecycle, request: ValidRequest, plan: PlanRuns) -> StagemeshError | None:
    return await life.run(request, plan, lambda record: record.size_bytes)


@pytest.mark.parametrize("plan", [_nothing_to_do, _no_replica])
async def test_an_ended_request_is_kept_without_its_input(plan: PlanRuns, no_collector: None) -> None:
    life, request = _life(), _request()
    given = weakref.ref(request)
    error = await _run(life, request, plan)
    del request
    assert given() is None
    assert life.has_run == (error is None)


@pytest.mark.parametrize("plan", [_nothing_to_do, _no_replica])
async def test_an_ended_request_without_references_is_freed_at_once(plan: PlanRuns, no_collector: None) -> None:
    life = _life()
    await _run(life, _request(), plan)
    life.stop(CancelledRequestError("too late"))
    ended = weakref.ref(life)
    del life
    assert ended() is None


async def test_a_request_stopped_in_the_queue_is_freed_at_once(no_collector: None) -> None:
    admission = Admission(LIMITS)
    lives = [_life(name, admission=admission) for name in "ab"]
    waiting = lives.pop()
    waiting.stop(CancelledRequestError("by somebody"))
    error = await _run(waiting, _request(), _nothing_to_do)
    ended = weakref.ref(waiting)
    del waiting
    assert (str(error), ended()) == ("by somebody", None)


@pytest.mark.parametrize("admitted", [True, False])
async def test_a_cancelled_task_releases_its_admission(admitted: bool) -> None:
    admission = Admission(LIMITS)
    first, second = (_life(name, admission=admission) for name in "ab")
    task = asyncio.ensure_future(_run(second, _request(), _nothing_to_do))
    await asyncio.sleep(0)
    if admitted:
        await _run(first, _request(), _nothing_to_do)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    if not admitted:
        await _run(first, _request(), _nothing_to_do)
    assert (admission.loads.running.requests, admission.loads.waiting.requests) == (0, 0)


class _FailingClient:
    async def execute(self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float, take: TakeEvent) -> None:
        raise InternalError(f"{request.request_id} does not work")


async def test_a_failed_run_without_references_is_freed_at_once(tmp_path: Path, no_collector: None) -> None:
    stage = load(tmp_path).stages["a"]
    replica = SimpleNamespace(name="a-0", stage="a", endpoint="nowhere", end_cause=None, client=_FailingClient())
    replica.on_end = lambda _: lambda: None
    step = PlannedStep(stage, cast("Replica", replica), lambda: None)
    plan, errors = Plan({"a": step}, Route((stage,), (), {})), list[StagemeshError]()
    planes, record = InputPlanes("p"), RequestRecord()
    run = RequestRun(
        _request(), plan, record, replacements=REPLACEMENTS, timeout_s=10, failed=errors.append, input_planes=planes
    )
    error = await run.run()
    assert errors == [error]
    ended = weakref.ref(run)
    del run
    assert (str(error), ended()) == ("r does not work", None)


@pytest.mark.usefixtures("no_collector")
async def test_a_request_that_is_no_longer_kept_is_freed_at_once(chain: Mesh) -> None:
    await chain.generate(request_id="r1")
    await chain.until_idle()
    assert _found(RequestRecord) == 1
    _forget_ended()
    await asyncio.sleep(0)
    assert _found(RequestRecord) == 0


async def test_the_timeline_of_a_failed_request_refers_to_none_of_its_outputs(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"c": failing(InternalError("out of luck"))}) as chain:
        for number in range(4):
            await chain.failure(request_id=f"r{number}")
        await chain.until_idle()
        assert _found(RequestRecord) == 4
        _forget_ended()
        gc.collect()
        assert _found(RequestRecord) == 0


def _found(kind: type[object]) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


def _forget_ended() -> None:
    """Drops the requests that have ended, as their timers would."""
    for each in gc.get_objects():
        if type(each) is RequestRegistry:
            each.clear()


@pytest.mark.parametrize("keep_s", [60, 0])
async def test_an_ended_request_can_be_found_for_a_while(keep_s: int) -> None:
    table = RequestRegistry(keep_s=keep_s)
    table.add("r1", known := _life())
    table.end("r1")
    assert table.find("r1") is known
    await asyncio.sleep(0.001)
    assert table.find("r1") is (known if keep_s else None)
    assert not table.running
    table.clear()


async def test_only_an_ended_request_can_be_discarded() -> None:
    table = RequestRegistry()
    for request_id in ("r1", "r2"):
        table.add(request_id, _life())
    table.end("r1")
    for request_id in ("r1", "r2", "unknown"):
        table.discard_ended(request_id, caller="")
    assert (table.find("r1") is None, table.find("r2") is None) == (True, False)


async def test_the_oldest_requests_are_dropped_if_too_much_is_kept() -> None:
    table = RequestRegistry(keep_bytes=100)
    for request_id in ("r1", "r2", "r3"):
        table.add(request_id, _life(size_bytes=40))
        table.end(request_id)
    assert [table.find(request_id) is None for request_id in ("r1", "r2", "r3")] == [True, False, False]
    table.clear()


async def test_other_content_under_one_id_is_rejected() -> None:
    table = RequestRegistry()
    table.add("r1", _life())
    with pytest.raises(ExistsError, match="already exists with different content"):
        table.find_same("r1", b"other content")


class Owner:
    """Has a state until the budget drops it."""

    has_state = False

    def keep(self, budget: CheckpointBudget, size_bytes: int) -> None:
        self.has_state = budget.keep(self, size_bytes, drop=self._drop)

    def _drop(self) -> None:
        self.has_state = False


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 12)), max_size=40))
def test_the_limit_always_holds_and_the_newest_states_stay(steps: list[tuple[int, int]]) -> None:
    budget, owners, sizes = CheckpointBudget(10), [Owner() for _ in range(6)], dict[int, int]()
    for number, size_bytes in steps:
        owners[number].keep(budget, size_bytes)
        sizes.pop(number, None)
        if size_bytes <= 10:
            sizes[number] = size_bytes
        while sum(sizes.values()) > 10:
            del sizes[next(iter(sizes))]
        assert {i for i, owner in enumerate(owners) if owner.has_state} == set(sizes)
        assert budget.size_bytes == sum(sizes.values()) <= 10


def test_a_released_state_leaves_room_for_others() -> None:
    budget, first, second = CheckpointBudget(10), Owner(), Owner()
    first.keep(budget, 6)
    budget.release(first)
    budget.release(first)
    second.keep(budget, 10)
    assert (second.has_state, budget.size_bytes) == (True, 10)


def checkpoint(steps: int, size_bytes: int = 100) -> stage_pb2.Checkpoint:
    made = stage_pb2.Checkpoint(engine_steps=steps, rows={"latents": steps})
    made.tensors.add().inline = bytes(size_bytes)
    return made


def step_state(budget: CheckpointBudget) -> StepState:
    return StepState(step=cast("PlannedStep", None), budget=budget)


def is_kept(state: StepState) -> bool:
    assert (state.checkpoint is None) == (state.checkpoint_rows is None)
    return state.checkpoint is not None


def test_a_step_whose_state_is_dropped_has_no_checkpoint() -> None:
    budget = CheckpointBudget(300)
    first, second = step_state(budget), step_state(budget)
    first.store_checkpoint(checkpoint(1))
    second.store_checkpoint(checkpoint(1))
    assert is_kept(first)
    second.store_checkpoint(checkpoint(2, size_bytes=200))
    assert second.checkpoint is not None
    assert second.checkpoint.engine_steps == 2
    assert not is_kept(first)


def test_a_checkpoint_that_is_too_large_replaces_an_older_one_by_none() -> None:
    budget = CheckpointBudget(300)
    state = step_state(budget)
    state.store_checkpoint(checkpoint(1))
    state.store_checkpoint(checkpoint(2, size_bytes=400))
    assert not is_kept(state)
    assert budget.size_bytes == 0


@pytest.mark.parametrize(
    ("prompt_bytes", "state_bytes", "fits"),
    [
        (10, 6 << 20, True),
        (1 << 20, 6 << 20, True),
        (2 << 20, 6 << 20, False),
        (MAX_MESSAGE_BYTES - (1 << 20), 10, True),
        (MAX_MESSAGE_BYTES - (1 << 20), 1 << 20, False),
    ],
)
def test_a_useful_checkpoint_fits_a_message(tmp_path: Path, prompt_bytes: int, state_bytes: int, *, fits: bool) -> None:
    state = tensor_pb2.Tensor(name="state", inline=bytes(state_bytes))
    checkpoint = stage_pb2.Checkpoint(engine_steps=3, tensors=[state])
    assert _calls(tmp_path, prompt_bytes).can_resume_from(checkpoint) is fits


def test_a_checkpoint_without_a_state_is_useless(tmp_path: Path) -> None:
    calls = _calls(tmp_path, prompt_bytes=10)
    assert not calls.can_resume_from(stage_pb2.Checkpoint(engine_steps=3, rows={"text": 3}))
    assert calls.can_resume_from(stage_pb2.Checkpoint(engine_steps=3, token_ids=[5, 6, 7]))


def _calls(folder: Path, prompt_bytes: int) -> StepCalls:
    given = orchestrator_pb2.GenerateRequest(input=request_pb2.Input(text="x" * prompt_bytes))
    request, changed = validate(given, load(folder)), Notifier()
    record, failures = RequestRecord(), Failures(changed)
    return StepCalls(
        request, Route((), (), {}), {}, record=record, failures=failures, changed=changed, input_producer="@input-1"
    )
