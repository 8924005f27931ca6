"""Failures of stages, the error that the client receives, and the stages that stop."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import permutations
from pathlib import Path

import grpc
import pytest

from stagemesh.common.errors import (
    CancelledRequestError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    StagemeshError,
    StaleAttemptError,
    UnavailableError,
)
from stagemesh.orchestrator.request import lifecycle
from stagemesh.orchestrator.request.failures import Failure, root_cause
from stagemesh.v1 import request_pb2, stage_pb2
from tests.orchestrator.mesh import ask, mesh, until_health
from tests.orchestrator.scripted_stage import ACCEPTED, FINISHED, Response, Script, ScriptedStage, hang


def _failing(error: StagemeshError) -> Script:
    async def script(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        yield ACCEPTED
        await stage.until_fed(request)
        raise error

    return script


async def test_the_stage_that_failed_is_named_and_all_others_stop(tmp_path: Path) -> None:
    scripts = {"a": hang, "b": _failing(InternalError("out of luck")), "c": hang}
    async with mesh(tmp_path, scripts=scripts) as chain:
        error = await chain.failure(request_id="r1")
        await chain.until_idle()
        assert [len(stage.cancels) for stage in chain.stages.values()] == [1, 0, 1]
    assert (error.message, error.metadata["stage"]) == ("out of luck", "b")


async def test_a_reason_of_a_stages_own_reaches_the_client_unchanged(tmp_path: Path) -> None:
    own = InvalidRequestError("too loud", reason="X_TOO_LOUD", metadata={"loudness": "11"})
    async with mesh(tmp_path, scripts={"a": hang, "b": _failing(own), "c": hang}) as chain:
        error = await chain.failure()
    assert (type(error), error.reason, error.message) == (InvalidRequestError, "X_TOO_LOUD", "too loud")
    assert error.metadata["loudness"] == "11"


async def test_a_stage_that_echoes_an_abort_is_not_blamed(tmp_path: Path) -> None:
    echo = _failing(UnavailableError("lost the producer", metadata={"edge": "b->c"}))
    scripts = {"a": hang, "b": _slow_failure, "c": echo}
    async with mesh(tmp_path, scripts=scripts) as chain:
        error = await chain.failure()
    assert (error.message, error.metadata["stage"]) == ("the real cause", "b")


async def test_a_stage_that_lost_its_peer_does_not_count_as_lost(tmp_path: Path) -> None:
    relayed = UnavailableError("replica b-0 cannot be reached", metadata={"peer": "replica b-0 at somewhere"})
    scripts = {"a": _failing(relayed), "b": _slow_failure, "c": hang}
    async with mesh(tmp_path, scripts=scripts) as chain:
        error = await chain.failure()
    assert (error.message, error.metadata["stage"]) == ("the real cause", "b")


async def _slow_failure(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    del stage, request
    yield ACCEPTED
    await asyncio.sleep(0.1)  # The echo must arrive first.
    raise InternalError("the real cause")


def _saying(*positions: int, then: Sequence[Response] = ()) -> Script:
    async def script(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        del stage
        yield ACCEPTED
        for position in positions:
            yield Response(output=request_pb2.Output(name=request.streamed[0].tensor, text="x", position=position))
        for response in then:
            yield response
        await asyncio.Event().wait()

    return script


@pytest.mark.parametrize(
    ("positions", "said"),
    [
        ((1,), "sent output 'text' from position 1 where 0 was expected"),
        ((0, 1, 3), "sent output 'text' from position 3 where 2 was expected"),
        ((0, 1, 2, 1), "sent output 'text' from position 1 where 3 was expected"),
    ],
)
async def test_a_stage_whose_outputs_are_out_of_order_fails_the_request(
    tmp_path: Path, positions: tuple[int, ...], said: str
) -> None:
    async with mesh(tmp_path, scripts={"a": _saying(*positions), "b": hang, "c": hang}) as chain:
        error = await chain.failure()
        await chain.until_idle()
    assert said in error.message
    assert (error.reason, error.metadata["stage"]) == ("OUTPUT_OUT_OF_ORDER", "a")


async def test_an_output_after_the_end_of_its_stage_fails_the_request(tmp_path: Path) -> None:
    late = Response(output=request_pb2.Output(name="text", text="late", position=1))
    scripts = {"a": _saying(0, then=(FINISHED, late)), "b": hang, "c": hang}
    async with mesh(tmp_path, scripts=scripts) as chain:
        error = await chain.failure()
        await chain.until_idle()
    assert "stage 'a' sent output 'text' from position 1 after it had finished" in error.message
    assert error.reason == "OUTPUT_OUT_OF_ORDER"


async def test_a_request_waits_for_a_lost_stage_until_its_deadline(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": hang, "b": hang, "c": hang}, max_request_s=3.0) as chain:
        call = chain.stub.Generate(ask())
        await asyncio.gather(*(stage.started.wait() for stage in chain.stages.values()))
        await chain.servers["b"].grpc.stop(0)
        with pytest.raises(grpc.aio.AioRpcError, match="stage 'b' waits for a replica") as error:
            async for _ in call:
                pass
        assert error.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await chain.until_idle()


async def test_the_error_for_a_lost_stage_names_its_replicas_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lifecycle, "STAGE_WAIT_S", 0.2)
    async with mesh(tmp_path) as chain:
        await chain.servers["b"].stop(grace_s=0)
        await until_health(chain.channel, serving=False)
        error = await chain.failure()
    assert isinstance(error, UnavailableError)
    assert "no replica of stage 'b' is ready: b-0 unreachable" in error.message
    assert error.retry_after_s == 1.0


async def test_a_client_that_disconnects_leaves_nothing_running(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": hang, "b": hang, "c": hang}) as chain:
        call = chain.stub.Generate(ask())
        await asyncio.gather(*(stage.started.wait() for stage in chain.stages.values()))
        call.cancel()
        async with asyncio.timeout(1):
            await chain.until_idle()
            assert await chain.cancels(at_least=1) == [1, 1, 1]


async def test_cancel_returns_once_every_stage_has_released_the_request(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": hang, "b": hang, "c": hang}) as chain, asyncio.TaskGroup() as group:
        failure = group.create_task(chain.failure(request_id="r1"))
        await asyncio.gather(*(stage.started.wait() for stage in chain.stages.values()))
        await chain.cancel("r1")
        assert [len(stage.cancels) for stage in chain.stages.values()] == [1, 1, 1]
        assert isinstance(await failure, CancelledRequestError)
        await chain.until_idle()


async def test_cancelling_an_unknown_request_is_an_error(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        with pytest.raises(grpc.aio.AioRpcError, match="unknown request 'nobody'"):
            await chain.cancel("nobody")


async def test_the_deadline_error_names_the_stages_at_work(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"b": hang}, max_request_s=0.3) as chain:
        error = await chain.failure()
        await chain.until_idle()
    assert isinstance(error, DeadlineError)


async def test_a_stream_that_ends_before_its_step_is_an_error(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"c": _accept_only}) as chain:
        error = await chain.failure()
    assert "stage 'c' ended its stream before it finished" in error.message


async def _accept_only(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    del stage, request
    yield ACCEPTED


async def test_an_unrequested_cancellation_ends_the_request(tmp_path: Path) -> None:
    scripts = {"a": hang, "b": _failing(CancelledRequestError("someone called CancelStep")), "c": hang}
    async with mesh(tmp_path, scripts=scripts) as chain:
        error = await chain.failure()
        await chain.until_idle()
    assert isinstance(error, CancelledRequestError)
    assert error.metadata["stage"] == "b"


async def test_stopping_the_orchestrator_ends_its_requests(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": hang, "b": hang, "c": hang}) as chain:
        call = chain.stub.Generate(ask())
        await asyncio.gather(*(stage.started.wait() for stage in chain.stages.values()))
        await chain.stop()
        with pytest.raises(grpc.aio.AioRpcError, match="the orchestrator stopped"):
            async for _ in call:
                pass
        await chain.until_idle()


LOST = Failure("b", UnavailableError("gone", reason="REPLICA_LOST"))
BROKE = Failure("b", InternalError("broke"))
ECHO = Failure("c", InternalError("broke", metadata={"stage": "b"}))
NO_PRODUCER = Failure("c", UnavailableError("replica b-0 went away", reason="PEER_LOST"))
NOT_EXPECTED = Failure("a", NotFoundError("expects nothing", reason="UNKNOWN_FLOW"))
STOPPED = Failure("a", CancelledRequestError("the consumer stopped reading"))


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
    first, second = Failure("a", InvalidRequestError("one")), Failure("b", InvalidRequestError("two"))
    assert root_cause([first, second]) is first


@pytest.mark.parametrize(
    "failure",
    [
        LOST,
        NO_PRODUCER,
        NOT_EXPECTED,
        Failure("a", NotReadyError("it drains")),
        Failure("a", StaleAttemptError("replaced", metadata={"edge": "a->b"})),
    ],
)
def test_a_loss_is_recoverable(failure: Failure) -> None:
    assert failure.is_recoverable


@pytest.mark.parametrize("failure", [BROKE, ECHO, STOPPED, Failure("a", StaleAttemptError("made elsewhere"))])
def test_an_error_of_the_stage_itself_is_not_recoverable(failure: Failure) -> None:
    assert not failure.is_recoverable
