"""What a step of a request waits for, in words."""

from collections.abc import Sequence

from stagemesh.orchestrator.request.timeline import StepNotes
from stagemesh.v1 import control_pb2


def describe_wait(notes: StepNotes, report: control_pb2.StepReport | None, *, unready: Sequence[str]) -> str:
    """What the step waits for; empty where it computes, or has ended.

    `unready` are the stages that it feeds and that have not accepted the request; `report` is its replica's, None where
    that did not answer.
    """
    if notes.ended_s is not None:
        return ""
    if notes.sent_s is None:
        return f"{' and '.join(unready) or 'its consumers'} to accept the request"
    if notes.accepted_s is None:
        return f"{notes.replica} to accept the request"
    if report is None:
        return f"{notes.replica}, which does not say how far it is"
    return _outgoing(report.outlets) or _incoming(report.inlets) or ("" if report.started else "its engine")


def _outgoing(outlets: Sequence[control_pb2.FlowReport]) -> str:
    for flow in outlets:
        if not flow.connected and (flow.waiting_chunks or flow.wanted_bytes or flow.ended):
            return f"{flow.peer} to take edge {flow.edge}"
        if flow.wanted_bytes:
            return (
                f"credit of {flow.peer} on edge {flow.edge}: {flow.wanted_bytes:,} bytes, where {flow.credit_bytes:,} "
                "are left"
            )
    ended = [flow for flow in outlets if flow.ended and flow.waiting_chunks]
    if ended and all(flow.ended for flow in outlets):
        return f"{ended[0].peer} to take the last {ended[0].waiting_chunks} chunks of edge {ended[0].edge}"
    return ""


def _incoming(inlets: Sequence[control_pb2.FlowReport]) -> str:
    for flow in inlets:
        if not flow.ended and not flow.waiting_chunks:
            return f"chunk {flow.chunks} of edge {flow.edge} from {flow.peer}"
    return ""
