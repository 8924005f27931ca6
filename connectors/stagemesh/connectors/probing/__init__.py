"""Measures what connectors do between this host and another one, or within this one: real flows, and no pipeline."""

from stagemesh.connectors.probing.measuring import measure_peer
from stagemesh.connectors.probing.peer import ProbePeer
from stagemesh.connectors.probing.report import SIZES, ConnectorFigures, TransportReport
from stagemesh.connectors.probing.second_process import second_process

__all__ = ["SIZES", "ConnectorFigures", "ProbePeer", "TransportReport", "measure_peer", "second_process"]
