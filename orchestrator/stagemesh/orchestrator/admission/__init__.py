"""Admission: limits on requests and bytes, the queue and its order, and reports to waiting and rejected requests."""

from stagemesh.orchestrator.admission.admission import Admission
from stagemesh.orchestrator.admission.snapshot import AdmissionSnapshot, CallerLoad
from stagemesh.orchestrator.admission.ticket import AdmissionRequest, Listener, Ticket, TicketState

__all__ = ["Admission", "AdmissionRequest", "AdmissionSnapshot", "CallerLoad", "Listener", "Ticket", "TicketState"]
