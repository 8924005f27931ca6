"""The reasons why the steps of a request wait, according to the replicas that run them."""

from collections.abc import Sequence

from stagemesh.common.descriptors import INPUT
from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.request.timeline import StepNotes
from stagemesh.v1 import control_pb2


async def ask_for_report(
    replica: Replica, request_id: str, *, attempt: int, timeout_s: float
) -> control_pb2.StepReport | None:
    """Returns a replica's report about one attempt at its step of a request.

    Returns None if the replica does not answer in time, does not serve StageControlService, or does not run the step.
    """
    request = control_pb2.ListStepsRequest(request_id=request_id).SerializeToString()
    try:
        answer = await replica.client.control("ListSteps", request, timeout_s=timeout_s)
    except StagemeshError:
        return None
    steps = control_pb2.ListStepsResponse.FromString(answer).steps
    return next((step for step in steps if step.attempt == attempt), None)


def describe_wait(notes: StepNotes, report: control_pb2.StepReport | None, *, unready: Sequence[str]) -> str:
    """Describes in plain English what a step waits for.

    - `notes` is the orchestrator's timeline entry for the step.
    - `report` is the replica's report about the step, or None if the replica did not answer.
    - `unready` contains the names of the downstream stages that have not accepted the request yet.

    Returns an empty string if the step is computing or has ended.
    """
    if notes.ended_s is not None:
        return ""
    if notes.sent_s is None:
        return f"{' and '.join(unready) or 'its consumers'} to accept the request"
    if notes.accepted_s is None:
        return f"{notes.replica} to accept the request"
    if report is None:
        return f"{notes.replica}, which does not report its progress"
    return _outlet_wait(report.outlets) or _inlet_wait(report.inlets) or ("" if report.started else "its engine")


def _outlet_wait(outlets: Sequence[control_pb2.FlowReport]) -> str:
    for flow in outlets:
        if not flow.connected and (flow.waiting_chunks or flow.wanted_bytes or flow.ended):
            return f"{flow.peer} to accept edge {flow.edge}"
        if flow.wanted_bytes:
            return (
                f"credit from {flow.peer} on edge {flow.edge}: it needs {flow.wanted_bytes:,} bytes, and "
                f"{flow.credit_bytes:,} remain"
            )
    ended = [flow for flow in outlets if flow.ended and flow.waiting_chunks]
    if ended and all(flow.ended for flow in outlets):
        return f"{ended[0].peer} to receive the last {ended[0].waiting_chunks} chunks of edge {ended[0].edge}"
    return ""


def _inlet_wait(inlets: Sequence[control_pb2.FlowReport]) -> str:
    for flow in inlets:
        if not flow.ended and not flow.waiting_chunks:
            if flow.peer.startswith(INPUT):
                return f"input of the client on edge {flow.edge}, of which {flow.chunks} chunks have arrived"
            return f"chunk {flow.chunks} of edge {flow.edge} from {flow.peer}"
    return ""
