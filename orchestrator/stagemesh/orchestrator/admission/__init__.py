"""Admission: limits on requests and bytes, the queue and its order, and what those who wait or are refused are told."""

from stagemesh.orchestrator.admission.admission import Admission
from stagemesh.orchestrator.admission.lanes import Claim, Listener, Ticket, TicketState
from stagemesh.orchestrator.admission.snapshot import AdmissionSnapshot, CallerLoad

__all__ = ["Admission", "AdmissionSnapshot", "CallerLoad", "Claim", "Listener", "Ticket", "TicketState"]
