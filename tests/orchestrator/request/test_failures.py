"""Failures of stages, the errors that clients receive, and clients that leave, return and attach to a request."""

import asyncio
from collections.abc import AsyncIterator
from itertools import permutations
from pathlib import Path

import grpc
import pytest

from stagemesh.common import errors
from stagemesh.orchestrator.request import lifecycle
from stagemesh.orchestrator.request.failures import Failure, root_cause
from stagemesh.v1 import orchestrator_pb2, request_pb2, stage_pb2
from tests.orchestrator.mesh import Mesh, ask, mesh, texts, until_health
from tests.orchestrator.scripted_stage import (
    ACCEPTED,
    FINISHED,
    Response,
    Script,
    ScriptedStage,
    failing,
    hang,
    say_hello,
    text_output,
)
from tests.rpc.call_errors import error_of

_MOST_BREAKS = 16


async def test_the_stage_that_failed_is_named_and_all_others_stop(tmp_path: Path) -> None:
    scripts = {"a": hang, "b": failing(errors.InternalError("out of luck")), "c": hang}
    async with mesh(tmp_path, scripts=scripts) as chain:
        error = await chain.failure(request_id="r1")
        await chain.until_idle()
        assert [len(stage.cancels) for stage in chain.stages.values()] == [1, 0, 1]
    assert (error.message, error.metadata["stage"]) == ("out of luck", "b")


async def _failure(folder: Path, **scripts: Script) -> errors.StagemeshError:
    """Runs a request over stages with these scripts. Other stages never end. Returns the error when no stage runs."""
    async with mesh(folder, scripts={**dict.fromkeys("abc", hang), **scripts}) as chain:
        error = await chain.failure()
        await chain.until_idle()
    return error


async def test_a_reason_of_a_stages_own_reaches_the_client_unchanged(tmp_path: Path) -> None:
    own = errors.InvalidRequestError("too loud", reason="X_TOO_LOUD", metadata={"loudness": "11"})
    error = await _failure(tmp_path, b=failing(own))
    assert (type(error), error.reason, error.message) == (errors.InvalidRequestError, "X_TOO_LOUD", "too loud")
    assert error.metadata["loudness"] == "11"


_ECHOES = {
    "an abort": ("c", errors.UnavailableError("lost the producer", metadata={"edge": "b->c"})),
    "a lost peer": (
        "a",
        errors.UnavailableError("b-0 cannot be reached", metadata={"peer": "replica b-0 at somewhere"}),
    ),
}


@pytest.mark.parametrize(("stage", "echo"), _ECHOES.values(), ids=_ECHOES)
async def test_a_stage_is_not_blamed_for_its_peer(tmp_path: Path, stage: str, echo: errors.StagemeshError) -> None:
    error = await _failure(tmp_path, **{"b": _slow_failure, stage: failing(echo)})
    assert (error.message, error.metadata["stage"]) == ("the real cause", "b")


async def _slow_failure(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    yield ACCEPTED
    await asyncio.sleep(0.1)  # The echo must arrive first.
    raise errors.InternalError("the real cause")


def _saying(*positions: int, finished_after: int | None = None, ends: int | None = None) -> Script:
    """Returns a script that emits characters at these positions.

    The step finishes early, after `finished_after` of them, or the output, with character number `ends`.
    """

    async def script(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        yield ACCEPTED
        for number, position in enumerate(positions):
            if number == finished_after:
                yield FINISHED
            output = request_pb2.Output(name=request.streamed[0].tensor, text="x", position=position)
            if number == ends:
                output.finish.reason = request_pb2.FINISH_REASON_END
            yield Response(output=output)
        await asyncio.Event().wait()

    return script


_DISORDERED = {
    "late begin": (_saying(1), "1 where 0 was expected"),
    "gap": (_saying(0, 1, 3), "3 where 2 was expected"),
    "repetition": (_saying(0, 1, 2, 1), "1 where 3 was expected"),
    "after the end": (_saying(0, 1, finished_after=1), "1 after it had finished"),
    "after the end of the output": (_saying(0, 1, ends=0), "1 after it had finished"),
}


@pytest.mark.parametrize(("script", "said"), _DISORDERED.values(), ids=_DISORDERED)
async def test_outputs_out_of_order_fail_the_request(tmp_path: Path, script: Script, said: str) -> None:
    error = await _failure(tmp_path, a=script)
    assert f"stage 'a' sent output 'text' from position {said}" in error.message
    assert (error.reason, error.metadata["stage"]) == ("OUTPUT_OUT_OF_ORDER", "a")


@pytest.mark.parametrize("accepts", [False, True])
async def test_calls_that_end_without_a_reason_again_and_again_fail_the_request_with_their_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepts: bool
) -> None:
    calls = list[str]()

    async def crash(
        stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest, context: object
    ) -> AsyncIterator[Response]:
        calls.append(request.step_id)
        if accepts:
            yield ACCEPTED
        raise RuntimeError("the handler is broken")

    monkeypatch.setattr(ScriptedStage, "ExecuteStep", crash)
    async with mesh(tmp_path, scripts={}, minimal="abc") as chain:
        error = await chain.failure()
    assert (type(error), "the handler is broken" in error.message) == (errors.InternalError, True)
    assert calls.count("r/c/1") <= _MOST_BREAKS + accepts


async def test_a_request_waits_for_a_lost_stage_until_its_deadline(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts=dict.fromkeys("abc", hang), max_request_s=3.0) as chain:
        call = chain.stub.Generate(ask())
        await chain.until_started()
        await chain.servers["b"].grpc.stop(0)
        error = await error_of(call)
        assert (type(error), "stage 'b' waits for a replica" in error.message) == (errors.DeadlineError, True)
        await chain.until_idle()


async def test_the_error_of_a_lost_stage_has_its_state(chain: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifecycle, "STAGE_WAIT_S", 0.2)
    await chain.servers["b"].stop(grace_s=0)
    await until_health(chain.channel, serving=False)
    error = await chain.failure()
    assert (type(error), error.retry_after_s) == (errors.UnavailableError, 1.0)
    assert "no replica of stage 'b' is ready: b-0 unreachable" in error.message


async def test_cancelling_an_unknown_request_is_an_error(chain: Mesh) -> None:
    assert "unknown request 'nobody'" in (await error_of(chain.cancel("nobody"))).message


async def test_a_stream_that_ends_before_its_step_is_an_error(tmp_path: Path) -> None:
    error = await _failure(tmp_path, c=_accept_only)
    assert "stage 'c' ended its stream before it finished" in error.message


async def _accept_only(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    yield ACCEPTED


async def test_an_unrequested_cancellation_ends_the_request(tmp_path: Path) -> None:
    error = await _failure(tmp_path, b=failing(errors.CancelledRequestError("someone called CancelStep")))
    assert (type(error), error.metadata["stage"]) == (errors.CancelledRequestError, "b")


async def test_stopping_the_orchestrator_ends_its_requests(busy: Mesh) -> None:
    call = busy.stub.Generate(ask())
    await busy.until_started()
    await busy.stop()
    assert "the orchestrator stopped" in (await error_of(call)).message
    await busy.until_idle()


LOST = Failure("b", errors.UnavailableError("gone", reason="REPLICA_LOST"))
BROKE = Failure("b", errors.InternalError("broke"))
ECHO = Failure("c", errors.InternalError("broke", metadata={"stage": "b"}))
NO_PRODUCER = Failure("c", errors.UnavailableError("replica b-0 went away", reason="PEER_LOST"))
NOT_EXPECTED = Failure("a", errors.NotFoundError("expects nothing", reason="UNKNOWN_FLOW"))
STOPPED = Failure("a", errors.CancelledRequestError("the consumer stopped reading"))
DRAINING = Failure("a", errors.NotReadyError("it drains"))
REPLACED = Failure("a", errors.StaleAttemptError("replaced", metadata={"edge": "a->b"}))


@pytest.mark.parametrize("root", [LOST, BROKE])
def test_the_root_cause_is_found_in_any_order_of_failures(root: Failure) -> None:
    for failures in permutations([root, ECHO, NO_PRODUCER, NOT_EXPECTED, STOPPED]):
        assert root_cause(failures) is root


def test_a_lost_replica_explains_the_failures_of_adjacent_stages() -> None:
    assert root_cause([BROKE, LOST]) is LOST


@pytest.mark.parametrize(("failure", "conclusive"), [(LOST, True), (BROKE, True), (ECHO, False), (NO_PRODUCER, False)])
def test_only_a_conclusive_cause_ends_the_wait(failure: Failure, conclusive: bool) -> None:
    assert failure.is_conclusive is conclusive


def test_of_two_causes_the_first_counts() -> None:
    first, second = Failure("a", errors.InvalidRequestError("one")), Failure("b", errors.InvalidRequestError("two"))
    assert root_cause([first, second]) is first


@pytest.mark.parametrize("failure", [LOST, NO_PRODUCER, NOT_EXPECTED, DRAINING, REPLACED])
def test_a_loss_is_recoverable(failure: Failure) -> None:
    assert failure.is_recoverable


@pytest.mark.parametrize("failure", [BROKE, ECHO, STOPPED, Failure("a", errors.StaleAttemptError("made elsewhere"))])
def test_an_error_of_the_stage_itself_is_not_recoverable(failure: Failure) -> None:
    assert not failure.is_recoverable


async def test_a_second_call_gets_the_same_request_from_its_start(chain: Mesh) -> None:
    first = await chain.generate(request_id="r1")
    second = await chain.generate(request_id="r1")
    assert len(chain.stages["a"].requests) == 1
    assert first == second


async def test_a_known_id_with_other_content_is_rejected(chain: Mesh) -> None:
    await chain.generate(request_id="r1")
    error = await chain.failure(request_id="r1", outputs=["last"])
    assert (type(error), error.reason) == (errors.ExistsError, "REQUEST_EXISTS")


async def test_a_caller_resumes_at_its_next_part(chain: Mesh) -> None:
    await chain.generate(request_id="r1")
    events = await chain.generate(request_id="r1", next_positions=[{"name": "first", "position": 2}])
    assert (texts(events, "first"), texts(events, "last")) == ("done", "c done")


async def test_a_request_runs_until_its_last_caller_leaves(busy: Mesh) -> None:
    calls = [await _joined(busy), await _joined(busy)]
    calls[0].cancel()
    assert (await busy.describe()).in_flight == 1
    calls[1].cancel()
    await busy.until_idle(within_s=1)
    assert await busy.cancels(at_least=1) == [1, 1, 1]


async def test_a_caller_resumes_after_its_position(chain: Mesh) -> None:
    positions = [{"name": "first", "position": 4}, {"name": "last", "position": 6}]
    events = await chain.generate(request_id="r1", next_positions=positions)
    assert (texts(events, "first"), texts(events, "last")) == ("ne", "")


async def test_the_reported_seed_may_be_sent_again(chain: Mesh) -> None:
    first = await chain.generate(request_id="r1")
    seed = first[0].admitted.seed
    assert await chain.generate(request_id="r1", parameters={"seed": seed}) == first
    error = await chain.failure(request_id="r1", parameters={"seed": seed ^ 1})
    assert error.reason == "REQUEST_EXISTS"


async def test_a_request_waits_for_a_caller_that_returns(busy: Mesh) -> None:
    (await _joined(busy, linger_s=30)).cancel()
    (await _joined(busy, linger_s=0)).cancel()
    await busy.until_idle()
    assert len(busy.stages["a"].requests) == 1


async def test_a_request_ends_if_no_caller_returns_in_time(busy: Mesh) -> None:
    (await _joined(busy, linger_s=1)).cancel()
    assert (await busy.describe()).in_flight == 1
    await busy.until_idle()


async def test_a_dismissed_caller_is_not_waited_for(busy: Mesh) -> None:
    call, other = await _joined(busy, linger_s=30), await _joined(busy, linger_s=30)
    await busy.cancel("r1", when_left=True)
    call.cancel()
    assert (await busy.describe()).in_flight == 1
    other.cancel()
    await busy.until_idle()


async def test_cancel_when_left_ends_a_lingering_request(busy: Mesh) -> None:
    (await _joined(busy, linger_s=30)).cancel()
    await busy.cancel("r1", when_left=True)
    await busy.until_idle()
    assert await busy.cancels(at_least=1) == [1, 1, 1]


async def test_a_caller_that_returns_too_late_starts_the_request_again(busy: Mesh) -> None:
    (await _joined(busy)).cancel()
    busy.run(say_hello)
    events = await busy.generate(request_id="r1", earlier_calls=1, next_positions=[{"name": "last", "position": 2}])
    assert (texts(events, "first"), texts(events, "last")) == ("a done", "done")
    assert [request.attempt for request in busy.stages["a"].requests] == [1, 1001]
    assert busy.stages["a"].requests[1].step_id == "r1/a/1001"


async def test_a_call_takes_over_the_steps_of_another_orchestrator(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"c": _accept_attempt_541}) as chain:
        events = await chain.generate(request_id="r1")
        attempts = [request.attempt for request in chain.stages["c"].requests]
    assert attempts == [1, 541]
    assert [event.WhichOneof("event") for event in events].count("admitted") == 1
    assert texts(events, "last") == "c done"


async def test_a_request_that_was_taken_over_is_not_taken_back(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": _talk_and_lose, "b": hang, "c": hang}) as chain:
        error = await chain.failure(request_id="r1")
        assert len(chain.stages["a"].requests) == 1
    assert error.reason == "NOT_RUNNING"


@pytest.mark.parametrize("facts", [{}, {"attempt": 2**32 - 1}], ids=str)
def test_an_attempt_that_none_can_follow_is_ignored(facts: dict[str, int]) -> None:
    assert lifecycle.latest_attempt(errors.StaleAttemptError("it is over", facts=facts)) is None


async def _accept_attempt_541(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    if request.attempt <= 41:
        raise errors.StaleAttemptError("it is over", facts={"attempt": 41})
    async for response in say_hello(stage, request):
        yield response


async def _talk_and_lose(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    yield ACCEPTED
    yield text_output(request.streamed[0].tensor, "so far")
    raise errors.StaleAttemptError("it is over", facts={"attempt": 41})


async def _joined(
    chain: Mesh, *, linger_s: int = 0
) -> "grpc.aio.UnaryStreamCall[orchestrator_pb2.GenerateRequest, orchestrator_pb2.GenerateResponse]":
    """Starts a call and waits for the first stage's output. The first stage is the last to be started."""
    call = chain.stub.Generate(ask(request_id="r1", linger_s=linger_s))
    async for event in call:
        if event.output.name == "first":
            break
    return call
