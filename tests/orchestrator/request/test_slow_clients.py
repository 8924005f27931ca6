"""Clients that read more slowly than the outputs arrive."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import stage_pb2
from tests.orchestrator.mesh import CHAIN, ask, mesh
from tests.orchestrator.request.texts import add_texts
from tests.orchestrator.scripted_stage import ACCEPTED, Response, ScriptedStage, hang, text_output

_LIMITED = CHAIN + "limits: {max_unread_bytes: 4194304}\n"
_PIECE = "x" * (256 << 10)


async def _talk(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    """Sends output without end."""
    del stage
    yield ACCEPTED
    while True:
        yield text_output(request.streamed[0].tensor, _PIECE)
        await asyncio.sleep(0)


async def test_a_client_that_does_not_read_stops_its_request_and_later_gets_the_error(tmp_path: Path) -> None:
    async with mesh(tmp_path, _LIMITED, scripts={"a": _talk, "b": hang, "c": hang}) as chain:
        call = chain.stub.Generate(ask())
        events = [await anext(aiter(call))]
        await asyncio.gather(*(stage.started.wait() for stage in chain.stages.values()))
        await chain.until_idle()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for event in call:
                events.append(event)  # noqa: PERF401
    error = from_rpc_error(caught.value, peer="the orchestrator")
    assert "4,194,304 bytes (limits.max_unread_bytes) behind" in error.message
    assert error.reason == "CLIENT_TOO_SLOW"
    outputs = [event.output for event in events if event.HasField("output") and event.output.name == "first"]
    assert [output.position for output in outputs] == [n * len(_PIECE) for n in range(len(outputs))]
    assert 4 << 20 < len(outputs) * len(_PIECE) < 32 << 20


def _record(stopped: list[str], *, limit_bytes: int = 1000) -> RequestRecord:
    record = RequestRecord()
    record.stop_by(lambda error: stopped.append(error.reason), max_unread_bytes=limit_bytes)
    return record


def _add(record: RequestRecord, size_bytes: int) -> None:
    add_texts(record, "x" * size_bytes)


async def test_a_client_that_keeps_up_may_read_any_amount() -> None:
    stopped: list[str] = []
    record = _record(stopped)
    _add(record, 1)
    reading = record.follow(next_positions={})
    for _ in range(100):
        await anext(reading)
        _add(record, 300)
    assert stopped == []
    await reading.aclose()


async def test_the_fastest_of_several_callers_counts() -> None:
    stopped: list[str] = []
    record = _record(stopped)
    _add(record, 1)
    fast, slow = record.follow(next_positions={}), record.follow(next_positions={})
    await anext(slow)
    for _ in range(10):
        await anext(fast)
        _add(record, 300)
    assert stopped == []
    for _ in range(3):
        _add(record, 300)
    assert stopped[:1] == ["CLIENT_TOO_SLOW"]
    await fast.aclose()
    await slow.aclose()


async def test_a_request_without_callers_or_with_a_late_caller_is_not_stopped_for_its_size() -> None:
    stopped: list[str] = []
    record = _record(stopped)
    for _ in range(10):
        _add(record, 300)
    late = record.follow(next_positions={})
    await anext(late)
    _add(record, 300)
    assert stopped == []
    await late.aclose()
