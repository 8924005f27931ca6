"""What a request has made, as it is kept."""

from contextlib import aclosing

from stagemesh.orchestrator.record import RequestRecord
from stagemesh.v1 import orchestrator_pb2, request_pb2


def _record_of(*texts: str) -> RequestRecord:
    record = RequestRecord()
    for text in texts:
        record.add_output("text", request_pb2.Output(text=text))
    record.finish()
    return record


async def test_outputs_take_no_more_than_on_the_wire() -> None:
    record = _record_of("Hel", "lo")
    async with aclosing(record.journal.follow()) as items:
        assert sum([len(item) async for item in items]) == record.size_bytes


async def test_callers_hear_messages() -> None:
    record = _record_of("Hel", "lo")
    async with aclosing(record.follow(next_seqs={})) as events:
        heard = [event async for event in events]
    assert [event.output.text for event in heard if event.HasField("output")] == ["Hel", "lo"]
    assert isinstance(heard[-1], orchestrator_pb2.GenerateResponse)
    assert heard[-1].HasField("finished")
