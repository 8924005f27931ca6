import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from stagemesh.common.errors import ExistsError, StaleAttemptError
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.v1 import orchestrator_pb2, request_pb2, stage_pb2
from tests.orchestrator.mesh import Mesh, ask, mesh, texts
from tests.orchestrator.request.texts import add_texts
from tests.orchestrator.scripted_stage import ACCEPTED, Response, Script, ScriptedStage, hang, say_hello, text_output


async def test_a_second_call_gets_the_same_request_from_its_start(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        first = await chain.generate(request_id="r1")
        second = await chain.generate(request_id="r1")
        assert len(chain.stages["a"].requests) == 1
    assert first == second


async def test_a_known_id_with_other_content_is_rejected(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        await chain.generate(request_id="r1")
        error = await chain.failure(request_id="r1", outputs=["last"])
    assert isinstance(error, ExistsError)
    assert error.reason == "REQUEST_EXISTS"


async def test_a_caller_resumes_at_its_next_part(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        await chain.generate(request_id="r1")
        again = ask(request_id="r1")
        again.next_positions.add(name="first", position=2)
        events = [event async for event in chain.stub.Generate(again)]
    assert (texts(events, "first"), texts(events, "last")) == ("done", "c done")


async def test_a_request_runs_until_its_last_caller_leaves(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": hang, "b": hang, "c": hang}) as chain:
        calls = [await _joined(chain), await _joined(chain)]
        calls[0].cancel()
        assert (await chain.describe()).in_flight == 1
        calls[1].cancel()
        async with asyncio.timeout(1):
            await chain.until_idle()


async def test_a_caller_resumes_after_its_position(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        again = ask(request_id="r1")
        again.next_positions.add(name="first", position=4)
        again.next_positions.add(name="last", position=6)
        events = [event async for event in chain.stub.Generate(again)]
    assert (texts(events, "first"), texts(events, "last")) == ("ne", "")


async def test_the_reported_seed_may_be_sent_again(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        first = await chain.generate(request_id="r1")
        seed = first[0].admitted.seed
        assert await chain.generate(request_id="r1", parameters=request_pb2.Parameters(seed=seed)) == first
        error = await chain.failure(request_id="r1", parameters=request_pb2.Parameters(seed=seed ^ 1))
    assert error.reason == "REQUEST_EXISTS"


async def test_a_request_waits_for_a_caller_that_returns(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": hang, "b": hang, "c": hang}) as chain:
        (await _joined(chain, linger_s=30)).cancel()
        (await _joined(chain, linger_s=0)).cancel()
        async with asyncio.timeout(5):
            await chain.until_idle()
        assert len(chain.stages["a"].requests) == 1


async def test_a_request_ends_if_no_caller_returns_in_time(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": hang, "b": hang, "c": hang}) as chain:
        (await _joined(chain, linger_s=1)).cancel()
        assert (await chain.describe()).in_flight == 1
        async with asyncio.timeout(5):
            await chain.until_idle()


async def test_a_dismissed_caller_is_not_waited_for(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": hang, "b": hang, "c": hang}) as chain:
        call, other = await _joined(chain, linger_s=30), await _joined(chain, linger_s=30)
        await chain.cancel("r1", when_left=True)
        call.cancel()
        assert (await chain.describe()).in_flight == 1
        other.cancel()
        async with asyncio.timeout(5):
            await chain.until_idle()


async def test_cancel_when_left_ends_a_lingering_request(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": hang, "b": hang, "c": hang}) as chain:
        (await _joined(chain, linger_s=30)).cancel()
        await chain.cancel("r1", when_left=True)
        async with asyncio.timeout(5):
            await chain.until_idle()
            assert await chain.cancels(at_least=1) == [1, 1, 1]


async def test_the_number_of_earlier_calls_is_limited(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        again = ask(request_id="r1")
        again.earlier_calls = 1_000_001
        with pytest.raises(grpc.aio.AioRpcError, match="earlier_calls is 1000001"):
            _ = [event async for event in chain.stub.Generate(again)]


async def test_a_caller_that_returns_too_late_starts_the_request_again(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": hang, "b": hang, "c": hang}) as chain:
        (await _joined(chain)).cancel()
        chain.stages["a"].script = chain.stages["b"].script = chain.stages["c"].script = say_hello
        again = ask(request_id="r1")
        again.next_positions.add(name="last", position=2)
        again.earlier_calls = 1
        events = [event async for event in chain.stub.Generate(again)]
    assert (texts(events, "first"), texts(events, "last")) == ("a done", "done")
    assert [request.attempt for request in chain.stages["a"].requests] == [1, 1001]
    assert chain.stages["a"].requests[1].step_id == "r1/a/1001"


async def test_a_call_takes_over_the_steps_of_another_orchestrator(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"c": _taken_up_to(41)}) as chain:
        events = await chain.generate(request_id="r1")
        attempts = [request.attempt for request in chain.stages["c"].requests]
    assert attempts == [1, 42]
    assert [event.WhichOneof("event") for event in events].count("admitted") == 1
    assert texts(events, "last") == "c done"


async def test_a_request_that_was_taken_over_is_not_taken_back(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": _talk_and_lose, "b": hang, "c": hang}) as chain:
        error = await chain.failure(request_id="r1")
        assert len(chain.stages["a"].requests) == 1
    assert error.reason == "STALE_ATTEMPT"


def _taken_up_to(latest: int) -> Script:
    async def refuse(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        if request.attempt <= latest:
            raise StaleAttemptError("it is over", metadata={"attempt": str(latest)})
        async for response in say_hello(stage, request):
            yield response

    return refuse


async def _talk_and_lose(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    yield ACCEPTED
    yield text_output(request.streamed[0].tensor, "so far")
    raise StaleAttemptError("it is over", metadata={"attempt": "41"})


async def _joined(
    chain: Mesh, *, linger_s: int = 0
) -> "grpc.aio.UnaryStreamCall[orchestrator_pb2.GenerateRequest, orchestrator_pb2.GenerateResponse]":
    """Starts a call and waits for the first stage's output. The first stage is the last to be started."""
    request = ask(request_id="r1")
    request.linger_s = linger_s
    call = chain.stub.Generate(request)
    async for event in call:
        if event.output.name == "first":
            break
    return call


async def test_a_record_keeps_the_order_for_late_readers() -> None:
    record = RequestRecord()
    admitted = orchestrator_pb2.RequestAdmitted(request_id="r1", seed=1)
    record.add(orchestrator_pb2.GenerateResponse(admitted=admitted))
    add_texts(record, "one", "two")
    record.close(None)
    events = [orchestrator_pb2.GenerateResponse.FromString(event) async for event in record.follow(next_positions={})]
    assert [(event.output.text, event.output.position) for event in events[1:3]] == [("one", 0), ("two", 3)]
