"""Adds texts to the record of a request."""

from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.v1 import request_pb2


def add_texts(record: RequestRecord, *texts: str, begin: int | None = None) -> None:
    """Adds parts of the output "text", from position `begin` on. None means that they continue the output."""
    position = record.position.counts.get(("text", 0), 0) if begin is None else begin
    for text in texts:
        record.add_output(request_pb2.Output(name="text", position=position, text=text))
        position += len(text)
