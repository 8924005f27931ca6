"""The record of a request's events."""

from contextlib import aclosing

import pytest

from stagemesh.common.errors import CancelledRequestError, InternalError, StagemeshError, UnavailableError
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.v1 import orchestrator_pb2, request_pb2
from tests.orchestrator.request.texts import add_texts


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
