"""The agreement of two replicas on a connector, and the connectors of one replica."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.common.plugins.connectors import ConnectorDescriptor, ConnectorName, descriptor_of, name_of, number_of
from stagemesh.common.plugins.entry_points import import_factory
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.base import Connector
from stagemesh.rpc.error_mapping import error_from_wire, error_to_wire
from stagemesh.v1 import stage_pb2


@dataclass(frozen=True)
class EdgeProbe:
    """The result of a connector negotiation without a flow. `connector` is the connector that a flow would use."""

    connector: ConnectorName
    refusals: Mapping[ConnectorName, StagemeshError]
    """The connectors that are preferred over the selected one but cannot be used, each with the error that states why.

    May be empty.
    """


def probe_to_wire(probe: EdgeProbe) -> stage_pb2.ProbeEdgeResponse:
    """Converts an EdgeProbe to its protobuf message."""
    return stage_pb2.ProbeEdgeResponse(
        connector=number_of(probe.connector),
        refusals=[
            stage_pb2.ConnectorRefusal(connector=number_of(name), error=error_to_wire(error))
            for name, error in probe.refusals.items()
        ],
    )


def probe_from_wire(message: stage_pb2.ProbeEdgeResponse) -> EdgeProbe:
    """Converts a protobuf message to an EdgeProbe. Raises InvalidRequestError if a connector is unknown."""
    refusals = {name_of(refusal.connector): error_from_wire(refusal.error) for refusal in message.refusals}
    return EdgeProbe(name_of(message.connector), refusals)


class ReplicaConnectors:
    """The connectors of one replica, by name. Creates each connector when it is first used."""

    def __init__(
        self, arena: Arena, *, landing: Callable[[], Awaitable[Arena]], replica: str, incarnation: str
    ) -> None:
        self._arena, self._landing = arena, landing
        self._replica, self._incarnation = replica, incarnation
        self._connectors: dict[ConnectorName, Connector] = {}

    def get(self, name: ConnectorName) -> Connector:
        """Returns the connector `name`. Creates the connector on the first call.

        Raises NotReadyError (CONNECTOR_UNAVAILABLE) if this replica cannot use the connector.
        """
        if name not in self._connectors:
            descriptor = descriptor_of(name)
            missing = descriptor.missing() or ("" if descriptor.factory else "it does not read arenas")
            if missing:
                raise NotReadyError(f"connector {name} cannot be used: {missing}", reason="CONNECTOR_UNAVAILABLE")
            self._connectors[name] = _load_factory(descriptor)(
                self._arena, landing=self._landing, replica=self._replica, incarnation=self._incarnation
            )
        return self._connectors[name]

    async def close(self) -> None:
        """Closes all created connectors. Idempotent."""
        while self._connectors:
            _, connector = self._connectors.popitem()
            await connector.close()


def _load_factory(descriptor: ConnectorDescriptor) -> Callable[..., Connector]:
    try:
        return import_factory(descriptor.factory)
    except (ImportError, AttributeError) as exc:
        remedy = descriptor.remedy or f"repair the installation of {descriptor.factory}"
        raise NotReadyError(
            f"connector {descriptor.name} cannot be loaded: {exc}; {remedy}", reason="CONNECTOR_UNAVAILABLE"
        ) from exc
