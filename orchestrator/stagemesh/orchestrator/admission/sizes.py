"""What a request is taken for, before it runs and when it has ended.

Counted are bytes that stay as long as the request runs: its input and its outputs, which the orchestrator keeps for
whoever attaches, and what its edges hold in arenas, each no more than its consumer's credit. The input is known when it
comes; for the rest as much is reserved as requests of its kind made so far, on average: limits are on sums. What
engines need for themselves is theirs to limit.
"""

from stagemesh.orchestrator.admission.caller_queues import AdmissionRequest
from stagemesh.orchestrator.request.record import RequestRecord
from stagemesh.orchestrator.request.validation import ValidRequest
from stagemesh.orchestrator.spec import Pipeline


def claim_of(request: ValidRequest, *, deadline_s: float) -> AdmissionRequest:
    """What a request asks for.

    Of one kind are those that want the same outputs by the same options, for inputs and token limits whose lengths have
    as many binary digits.
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
    """What a request that has ended made."""
    windows = {edge.name: pipeline.stages[edge.consumer].data_plane.window_bytes for edge in pipeline.edges}
    return record.size_bytes + sum(min(edge.size_bytes, windows.get(edge.edge, 0)) for edge in record.edges)
