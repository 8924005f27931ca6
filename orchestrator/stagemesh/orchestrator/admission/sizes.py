"""Determines the size in bytes of a request: an estimate for admission, and the measured size after its end.

Admission counts the bytes that a request occupies while it runs: its input, its outputs, and the chunks of its edges in
arenas. The orchestrator retains the outputs for callers that attach. The chunks of an edge occupy at most the credit
that the consumer has granted.

The input size is known when the request arrives. For outputs and chunks, admission reserves the average of earlier
requests of the same kind, because the limits apply to sums. Each engine limits its own memory.
"""

from stagemesh.orchestrator.admission.ticket import AdmissionRequest
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.orchestrator.request.validation import ValidRequest
from stagemesh.orchestrator.spec import Pipeline


def to_admission_request(request: ValidRequest, *, deadline_s: float) -> AdmissionRequest:
    """Converts a client's request to an admission request.

    Requests are of the same kind if they have the same outputs and options, and if their input sizes and token limits
    have the same number of binary digits.
    """
    parameters, input_bytes = request.parameters, request.input.ByteSize()
    kind = (
        request.outputs,
        input_bytes.bit_length(),
        parameters.sampling.max_tokens.bit_length(),
        tuple(sorted(parameters.options.items())),
    )
    return AdmissionRequest(
        request_id=request.request_id,
        caller=request.caller,
        priority=request.priority,
        deadline_s=deadline_s,
        input_bytes=input_bytes,
        kind=kind,
    )


def made_bytes(record: RequestRecord, pipeline: Pipeline) -> int:
    """Returns the number of bytes that a request occupied for its outputs and for the chunks of its edges."""
    windows = {edge.name: pipeline.stages[edge.consumer].data_plane.window_bytes for edge in pipeline.edges}
    return record.size_bytes + sum(min(edge.size_bytes, windows.get(edge.edge, 0)) for edge in record.edges)
