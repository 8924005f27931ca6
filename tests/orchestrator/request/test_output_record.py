"""The record of a request's events, and callers that read it slowly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import grpc
import pytest

from stagemesh.common.errors import CancelledRequestError, InternalError, StagemeshError, UnavailableError
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import orchestrator_pb2, request_pb2, stage_pb2
from tests.orchestrator.mesh import CHAIN, ask, mesh
from tests.orchestrator.request.texts import add_texts
from tests.orchestrator.scripted_stage import ACCEPTED, Response, ScriptedStage, hang, text_output


def _record_of(*texts: str) -> RequestRecord:
    record = RequestRecord(Timeline(outputs=("text",)))
    record.timeline.note_planned()
    add_texts(record, *texts)
    record.close(None)
    return record


async def test_outputs_take_as_many_bytes_as_on_the_wire() -> None:
    record = _record_of("Hel", "lo")
    async with aclosing(record.journal.follow()) as items:
        assert sum([len(item) async for item in items]) == record.size_bytes


async def _received(record: RequestRecord, **next_positions: int) -> list[orchestrator_pb2.GenerateResponse]:
    positions = {(name, 0): position for name, position in next_positions.items()}
    async with aclosing(record.follow(next_positions=positions)) as events:
        return [orchestrator_pb2.GenerateResponse.FromString(event) async for event in events]


async def test_callers_get_messages() -> None:
    received = await _received(_record_of("Hel", "lo"))
    assert [event.output.text for event in received if event.output.text] == ["Hel", "lo"]
    assert received[-2].output.finish.reason == request_pb2.FINISH_REASON_END
    assert received[-1].HasField("finished")


async def test_callers_get_the_outputs_that_they_lack() -> None:
    received = await _received(_record_of("Hel", "lo ", "you"), text=4)
    assert [event.output.text for event in received if event.output.text] == ["o ", "you"]
    assert [event.output.position for event in received if event.HasField("output")] == [4, 6, 9]


async def test_a_caller_with_the_whole_output_gets_its_end() -> None:
    (last, finished) = await _received(_record_of("Hel", "lo"), text=5)
    assert (last.output.position, last.output.WhichOneof("content")) == (5, None)
    assert last.output.finish.reason == request_pb2.FINISH_REASON_END
    assert finished.HasField("finished")


@pytest.mark.parametrize("position", [0, 4, 6])
async def test_the_events_so_far_are_those_that_a_caller_would_receive(position: int) -> None:
    record = _record_of("Hel", "lo ", "you")
    events = map(orchestrator_pb2.GenerateResponse.FromString, record.events_after({("text", 0): position}))
    assert list(events) == await _received(record, text=position)


async def test_a_restarted_stage_repeats_nothing() -> None:
    record = RequestRecord(Timeline(outputs=("text",)))
    record.timeline.note_planned()
    end = request_pb2.Output(name="text", position=5, finish=request_pb2.Finish(reason=request_pb2.FINISH_REASON_STOP))
    add_texts(record, "Hel", "lo")
    record.add_output(end)
    add_texts(record, "Hello", begin=0)
    record.add_output(end)
    record.close(None)
    received = await _received(record)
    assert [event.output.text for event in received if event.HasField("output")] == ["Hel", "lo", ""]


async def test_a_gap_in_an_output_is_a_defect() -> None:
    record = RequestRecord()
    add_texts(record, "He")
    with pytest.raises(InternalError, match="continues at 3, but only 2 were received"):
        add_texts(record, "o", begin=3)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (CancelledRequestError("stop"), request_pb2.FINISH_REASON_CANCELLED),
        (InternalError("broken"), request_pb2.FINISH_REASON_FAILED),
    ],
)
async def test_outputs_of_a_failed_request_end_with_its_usage(
    error: StagemeshError, reason: "request_pb2.FinishReason.ValueType"
) -> None:
    record = RequestRecord(Timeline(outputs=("text", "audio")))
    record.timeline.note_planned()
    record.timeline.begin("writer", replica="writer-0", attempt=1).usage = request_pb2.Usage(output_tokens=3)
    add_texts(record, "Hel")
    record.close(error)
    received: list[orchestrator_pb2.GenerateResponse] = []
    with pytest.raises(type(error)):
        async for event in record.follow(next_positions={}):
            received.append(orchestrator_pb2.GenerateResponse.FromString(event))  # noqa: PERF401
    ends = {event.output.name: event.output for event in received if event.output.HasField("finish")}
    assert {name: (end.position, end.finish.reason) for name, end in ends.items()} == {
        "text": (3, reason),
        "audio": (0, reason),
    }
    assert received[-1].finished.choices[0].stages["writer"].usage.output_tokens == 3


async def test_a_request_that_may_continue_elsewhere_does_not_end_its_outputs() -> None:
    record = RequestRecord(Timeline(outputs=("text",)))
    record.timeline.note_planned()
    add_texts(record, "Hel")
    record.close(UnavailableError("stops", reason="NOT_RUNNING"))
    with pytest.raises(UnavailableError):
        async for event in record.follow(next_positions={}):
            assert orchestrator_pb2.GenerateResponse.FromString(event).output.text == "Hel"


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
