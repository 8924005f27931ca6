"""Admission: limits on requests and bytes, the queue and its order, and what those who wait or are refused are told."""

from stagemesh.orchestrator.admission.admission import Admission
from stagemesh.orchestrator.admission.caller_queues import AdmissionRequest, Listener, Ticket, TicketState
from stagemesh.orchestrator.admission.snapshot import AdmissionSnapshot, CallerLoad

__all__ = ["Admission", "AdmissionRequest", "AdmissionSnapshot", "CallerLoad", "Listener", "Ticket", "TicketState"]
