"""Measures the connectors between two hosts or within one host, with real flows but without a pipeline."""

from stagemesh.bench.transport.measurement import SIZES, ConnectorFigures, TransportReport, measure_peer
from stagemesh.bench.transport.peer import ProbePeer, second_process

__all__ = ["SIZES", "ConnectorFigures", "ProbePeer", "TransportReport", "measure_peer", "second_process"]
