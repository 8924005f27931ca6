"""Requests with several choices, over scripted stages."""

import asyncio
from collections.abc import AsyncIterator
from itertools import product
from pathlib import Path

import pytest

from stagemesh.common import errors
from stagemesh.conformance.replicas import until
from stagemesh.v1 import admin_pb2, admin_pb2_grpc, orchestrator_pb2, request_pb2, stage_pb2
from tests.orchestrator.mesh import CHAIN, Mesh, ask, mesh
from tests.orchestrator.scripted_stage import ACCEPTED, FINISHED, Response, Script, ScriptedStage, hang, text_output
from tests.rpc.call_errors import error_of

Events = list[orchestrator_pb2.GenerateResponse]


def _texts(events: Events, name: str) -> dict[int, str]:
    """Returns the whole text of an output for each choice, by index."""
    texts: dict[int, str] = {}
    for event in events:
        if event.output.name == name:
            texts[event.output.index] = texts.get(event.output.index, "") + event.output.text
    return texts


async def _say_seed(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    yield ACCEPTED
    await stage.until_fed(request)
    yield Response(progress=stage_pb2.StepProgress(engine_steps=1))
    for tensor in request.streamed:
        yield text_output(tensor.tensor, f"{stage.name} {request.seed}")
    yield FINISHED


SEEDS = dict.fromkeys("abc", _say_seed)


async def test_each_choice_runs_with_the_next_seed(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts=SEEDS) as chain:
        events = await chain.generate(request_id="r", parameters={"choices": 3, "seed": 2**63 - 2})
        steps = chain.stages["b"].requests
    assert _texts(events, "last") == {0: f"c {2**63 - 2}", 1: f"c {2**63 - 1}", 2: "c 0"}
    assert {step.request_id: step.step_id for step in steps} == {"r": "r/b/1", "r/1": "r/1/b/1", "r/2": "r/2/b/1"}


async def test_every_event_names_its_choice(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts=SEEDS) as chain:
        events = await chain.generate(parameters={"choices": 2, "seed": 5})
    admitted, finished = events[0].admitted, events[-1].finished
    assert admitted.seed == 5
    assert [dict(each.replicas) for each in admitted.choices] == [{"a": "a-0", "b": "b-0", "c": "c-0"}] * 2
    steps = [{name: each.usage.engine_steps for name, each in choice.stages.items()} for choice in finished.choices]
    assert steps == [{"a": 3, "b": 3, "c": 3}] * 2
    progress = [(event.progress.stage, event.progress.index) for event in events if event.HasField("progress")]
    assert sorted(progress) == list(product("abc", range(2)))
    ends = [(event.output.name, event.output.index) for event in events if event.output.HasField("finish")]
    assert sorted(ends) == list(product(("first", "last"), range(2)))


async def test_a_returning_caller_gets_what_it_lacks_of_each_choice(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts=SEEDS) as chain:
        await chain.generate(request_id="r", parameters={"choices": 2, "seed": 5})
        first = [{"name": "first", "position": 2}, {"name": "first", "index": 1, "position": 3}]
        positions = [*first, {"name": "last", "index": 1, "position": 1}]
        events = await chain.generate(request_id="r", parameters={"choices": 2}, next_positions=positions)
    assert (_texts(events, "first"), _texts(events, "last")) == ({0: "5", 1: ""}, {0: "c 5", 1: " 6"})


async def _fail_second(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    """Fails for the second choice, once every stage runs all three choices. Never ends for the others."""
    yield ACCEPTED
    await stage.until_fed(request)
    for tensor in request.streamed:
        yield text_output(tensor.tensor, "c ")
    if request.request_id.endswith("/1"):
        await asyncio.gather(*(stage.peers["a-0"].started_steps[f"r{suffix}"].wait() for suffix in ("", "/1", "/2")))
        raise errors.InternalError("out of luck", metadata={"request_id": request.request_id})
    await asyncio.Event().wait()


async def test_the_error_of_one_choice_ends_the_request(tmp_path: Path) -> None:
    events: Events = []
    async with mesh(tmp_path, scripts={"a": hang, "b": hang, "c": _fail_second}) as chain:
        call = chain.stub.Generate(ask(request_id="r", parameters={"choices": 3}), timeout=20)
        error = await error_of(call, received=events)
        assert (error.message, error.metadata["request_id"]) == ("out of luck", "r")
        await chain.until_idle()
        assert (await chain.describe()).in_flight == 0
        cancelled = {name: sorted(each.request_id for each in stage.cancels) for name, stage in chain.stages.items()}
    assert cancelled == {"a": ["r", "r/1", "r/2"], "b": ["r", "r/1", "r/2"], "c": ["r", "r/2"]}
    ends = {(event.output.name, event.output.index): event.output.finish.reason for event in events}
    del ends["", 0]
    assert ends == {(name, index): request_pb2.FINISH_REASON_FAILED for name in ("first", "last") for index in range(3)}
    assert len(events[-1].finished.choices) == 3


async def test_a_failed_choice_stops_the_others_before_it_is_released(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": hang, "b": hang, "c": _fail_second}) as chain, asyncio.TaskGroup() as group:
        stage = chain.stages["b"]
        stage.released["r/1"] = asyncio.Event()
        failure = group.create_task(chain.failure(request_id="r", parameters={"choices": 3}))
        await until(lambda: {each.request_id for each in stage.cancels} >= {"r", "r/1", "r/2"}, timeout_s=10)
        stage.released["r/1"].set()
        assert "out of luck" in (await failure).message


def _taken_second(first_spoke: asyncio.Event, taken_over: asyncio.Event) -> Script:
    async def script(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        """Rejects the second choice's first attempt after an output of the first choice, which ends after the next."""
        if request.request_id == "r/1" and request.attempt == 1:
            await first_spoke.wait()
            raise errors.StaleAttemptError("it is over", facts={"attempt": 41})
        yield ACCEPTED
        await stage.until_fed(request)
        yield text_output(request.streamed[0].tensor, f"c {request.seed}")
        (taken_over if request.request_id == "r/1" else first_spoke).set()
        await taken_over.wait()
        yield FINISHED

    return script


async def test_a_choice_takes_over_from_another_orchestrator_alone(tmp_path: Path) -> None:
    script = _taken_second(asyncio.Event(), asyncio.Event())
    async with mesh(tmp_path, scripts={"c": script}) as chain:
        events = await chain.generate(request_id="r", parameters={"choices": 2, "seed": 5})
        attempts = sorted((step.request_id, step.attempt) for step in chain.stages["c"].requests)
    assert attempts == [("r", 1), ("r/1", 1), ("r/1", 541)]
    assert _texts(events, "last") == {0: "c 5", 1: "c 6"}
    assert [event.WhichOneof("event") for event in events].count("admitted") == 1


async def test_a_cancellation_stops_every_choice(busy: Mesh) -> None:
    async with asyncio.TaskGroup() as group:
        failure = group.create_task(busy.failure(request_id="r", parameters={"choices": 3}))
        await _until_running(busy, "r", "r/1", "r/2")
        assert (await busy.describe()).in_flight == 3
        await busy.cancel("r")
        assert [len(stage.cancels) for stage in busy.stages.values()] == [3, 3, 3]
        assert isinstance(await failure, errors.CancelledRequestError)
        assert (await busy.describe()).in_flight == 0


async def test_the_deadline_ends_every_choice(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts=dict.fromkeys("abc", hang), max_request_s=1.0) as chain:
        error = await chain.failure(parameters={"choices": 2})
        await chain.until_idle()
    assert (type(error), error.reason) == (errors.DeadlineError, "DEADLINE_EXCEEDED")


async def test_a_caller_that_leaves_stops_every_choice(busy: Mesh) -> None:
    call = busy.stub.Generate(ask(request_id="r", parameters={"choices": 2}))
    await _until_running(busy, "r", "r/1")
    call.cancel()
    await busy.until_idle()
    assert await busy.cancels(at_least=2) == [2, 2, 2]


_TOO_MANY = {
    "none": ("", 0, 16),
    "default": ("", 17, 16),
    "choices": ("limits: {max_choices: 3}", 4, 3),
    "running requests": ("limits: {max_in_flight: 2}", 3, 2),
    "requests of a caller": ("limits: {per_caller: {max_in_flight: 5}}", 6, 5),
}


@pytest.mark.parametrize(("limits", "choices", "most"), _TOO_MANY.values(), ids=_TOO_MANY)
async def test_too_many_choices_are_rejected(tmp_path: Path, limits: str, choices: int, most: int) -> None:
    async with mesh(tmp_path, CHAIN + limits, scripts=SEEDS) as chain:
        error = await chain.failure(parameters={"choices": choices})
        assert (await chain.describe()).limits.max_choices == most
        assert len(_texts(await chain.generate(parameters={"choices": most}), "last")) == most
    assert isinstance(error, errors.InvalidRequestError)
    assert (error.reason, error.metadata["max_choices"]) == ("INVALID_CHOICES", str(most))
    assert f"choices is {choices}; use 1 to {most}" in error.message


async def test_another_number_of_choices_is_another_request(chain: Mesh) -> None:
    await chain.generate(request_id="r", parameters={"choices": 2})
    error = await chain.failure(request_id="r", parameters={"choices": 3})
    assert error.reason == "REQUEST_EXISTS"


async def test_choices_wait_until_all_of_them_fit(tmp_path: Path) -> None:
    async with mesh(tmp_path, CHAIN + "limits: {max_in_flight: 3}", scripts=dict.fromkeys("abc", hang)) as chain:
        first = chain.stub.Generate(ask(request_id="r1", parameters={"choices": 2}))
        await _until_running(chain, "r1", "r1/1")
        second = chain.stub.Generate(ask(request_id="r2", parameters={"choices": 2}))
        assert (await anext(aiter(second))).queued.position == 1
        # It would fit, but does not overtake.
        third = chain.stub.Generate(ask(request_id="r3"))
        assert (await anext(aiter(third))).queued.position == 2
        chain.run(_say_seed)
        first.cancel()
        assert {len(_texts([event async for event in call], "last")) for call in (second, third)} == {1, 2}


async def test_operators_see_the_choices_of_each_step_and_flow(busy: Mesh) -> None:
    call = busy.stub.Generate(ask(request_id="r", parameters={"choices": 2}))
    await _until_running(busy, "r", "r/1")
    admin = admin_pb2_grpc.AdminServiceStub(busy.admin)
    answer = await admin.GetRequest(admin_pb2.GetRequestRequest(request_id="r"), timeout=10)
    (listed,) = (await admin.ListRequests(admin_pb2.ListRequestsRequest(), timeout=10)).requests
    call.cancel()
    assert (answer.request.choices, listed.request_id, listed.choices) == (2, "r", 2)
    assert sorted((step.index, step.stage) for step in answer.steps) == list(product(range(2), "abc"))


async def _until_running(chain: Mesh, *ids: str) -> None:
    """Waits until the last stage to start runs a step for each of these ids of choices."""
    await asyncio.gather(*(chain.stages["a"].started_steps[each].wait() for each in ids))
