"""What a probe found to and from the contract's messages."""

from stagemesh.common.connector_descriptors import name_of, number_of
from stagemesh.connectors.stream import wire
from stagemesh.connectors.stream.negotiation import EdgeProbe
from stagemesh.v1 import stage_pb2


def probe_to_wire(probe: EdgeProbe) -> stage_pb2.ProbeEdgeResponse:
    """The message of what was found."""
    return stage_pb2.ProbeEdgeResponse(
        connector=number_of(probe.connector),
        refusals=[
            stage_pb2.ConnectorRefusal(connector=number_of(name), error=wire.error_to_wire(error))
            for name, error in probe.refusals.items()
        ],
    )


def probe_from_wire(message: stage_pb2.ProbeEdgeResponse) -> EdgeProbe:
    """What was found; raises InvalidRequestError for a connector that is not known here."""
    refusals = {name_of(refusal.connector): wire.error_from_wire(refusal.error) for refusal in message.refusals}
    return EdgeProbe(name_of(message.connector), refusals)
