"""The record of a request's events."""

from collections.abc import Mapping
from contextlib import aclosing

from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.v1 import orchestrator_pb2, request_pb2


def _record_of(*texts: str) -> RequestRecord:
    record = RequestRecord()
    for text in texts:
        record.add_output("text", request_pb2.Output(text=text))
    record.finish()
    return record


async def test_outputs_take_as_many_bytes_as_on_the_wire() -> None:
    record = _record_of("Hel", "lo")
    async with aclosing(record.journal.follow()) as items:
        assert sum([len(item) async for item in items]) == record.size_bytes


async def _received(record: RequestRecord, **had: Mapping[str, int]) -> list[orchestrator_pb2.GenerateResponse]:
    async with aclosing(record.follow(**{"next_seqs": {}, **had})) as events:
        return [orchestrator_pb2.GenerateResponse.FromString(event) async for event in events]


async def test_callers_get_messages() -> None:
    received = await _received(_record_of("Hel", "lo"))
    assert [event.output.text for event in received if event.HasField("output")] == ["Hel", "lo"]
    assert received[-1].HasField("finished")


async def test_callers_get_the_outputs_that_they_lack() -> None:
    received = await _received(_record_of("Hel", "lo ", "you"), next_positions={"text": 4})
    assert [event.output.text for event in received if event.HasField("output")] == ["o ", "you"]
    assert [event.output.text for event in await _received(_record_of("Hel", "lo"), next_seqs={"text": 1})][:1] == [
        "lo"
    ]
