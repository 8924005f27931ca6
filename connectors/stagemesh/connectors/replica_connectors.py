"""The connectors of one replica. Each connector is created when it is first used."""

from collections.abc import Awaitable, Callable

from stagemesh.common.connector_descriptors import ConnectorDescriptor, ConnectorName, descriptor_of
from stagemesh.common.descriptors import import_factory
from stagemesh.common.errors import NotReadyError
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.base import Connector


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
