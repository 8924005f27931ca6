"""Admission control: limits running requests, queues further requests, and rejects requests if the queue is full."""

from stagemesh.orchestrator.admission.admission import Admission
from stagemesh.orchestrator.admission.queue import AdmissionRequest, Listener, Ticket, TicketState

__all__ = ["Admission", "AdmissionRequest", "Listener", "Ticket", "TicketState"]
