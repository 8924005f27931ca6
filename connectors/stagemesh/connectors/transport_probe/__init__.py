"""Measures the connectors between two hosts or within one host, with real flows but without a pipeline."""

from stagemesh.connectors.transport_probe.measurement import measure_peer
from stagemesh.connectors.transport_probe.peer import ProbePeer
from stagemesh.connectors.transport_probe.report import SIZES, ConnectorFigures, TransportReport
from stagemesh.connectors.transport_probe.second_process import second_process

__all__ = ["SIZES", "ConnectorFigures", "ProbePeer", "TransportReport", "measure_peer", "second_process"]
