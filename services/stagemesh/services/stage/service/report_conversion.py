"""Reports of steps in the contract's terms."""

from stagemesh.common.connector_descriptors import number_of
from stagemesh.services.stage.step.reports import FlowReport, StepReport
from stagemesh.v1 import control_pb2


def report_to_wire(report: StepReport) -> control_pb2.StepReport:
    """The message of a step's report."""
    return control_pb2.StepReport(
        request_id=report.request_id,
        step_id=report.step_id,
        attempt=report.attempt,
        age_s=report.age_s,
        started=report.started,
        inlets=map(_flow, report.inlets),
        outlets=map(_flow, report.outlets),
    )


def _flow(report: FlowReport) -> control_pb2.FlowReport:
    standing = report.standing
    return control_pb2.FlowReport(
        edge=standing.edge,
        peer=report.peer,
        connector=number_of(standing.connector),
        connected=standing.connected,
        chunks=standing.chunks,
        waiting_chunks=standing.waiting_chunks,
        waiting_bytes=standing.waiting_bytes,
        credit_bytes=standing.credit_bytes,
        wanted_bytes=standing.wanted_bytes,
        ended=standing.ended,
    )
