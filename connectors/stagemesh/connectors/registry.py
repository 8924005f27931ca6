"""The connectors that this installation knows, best first.

Others come as entry points in the group `stagemesh.connectors`, each naming a `ConnectorDescriptor`.
"""

from collections.abc import Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from importlib.util import find_spec

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.base import Connector
from stagemesh.connectors.edge import AUTO, GRPC, NIXL, SHM, ConnectorName
from stagemesh.v1 import chunk_pb2


@dataclass(frozen=True)
class ConnectorDescriptor:
    """A connector, without what it imports."""

    name: ConnectorName
    number: int
    """Its value of the contract's enum; from 1000 on for one that is added from outside."""
    rank: int
    """`auto` takes the usable one of the lowest rank; shm is 10, nixl 20, grpc 100."""
    factory: str = ""
    """ "module:callable" -> Connector, called with arena, landing, replica and incarnation; empty for grpc alone."""
    module: str = ""
    """What must be installed for it, where that is optional."""
    remedy: str = ""
    """How to install it."""

    def missing(self) -> str:
        """Why it cannot be used in this installation; empty where it can."""
        return "" if not self.module or _is_installed(self.module) else f"{self.module} is not installed: {self.remedy}"


_BUILT_IN = (
    ConnectorDescriptor(SHM, chunk_pb2.CONNECTOR_SHM, 10, "stagemesh.connectors.shm:ShmConnector"),
    ConnectorDescriptor(
        NIXL,
        chunk_pb2.CONNECTOR_NIXL,
        20,
        "stagemesh.connectors.nixl:NixlConnector",
        module="nixl_cu12",
        remedy="install stagemesh[nixl] on both hosts",
    ),
    ConnectorDescriptor(GRPC, chunk_pb2.CONNECTOR_GRPC, 100),
)


_FIRST_ADDED_NUMBER = 1000
_registered: list[ConnectorDescriptor] = []


@cache
def descriptors() -> Mapping[ConnectorName, ConnectorDescriptor]:
    """All connectors by name, best first. Raises NotReadyError where an added one takes what belongs to another."""
    added = [entry.load() for entry in entry_points(group="stagemesh.connectors")]
    _check_added(added)
    by_name = {card.name: card for card in (*_BUILT_IN, *added, *_registered)}
    return {card.name: card for card in sorted(by_name.values(), key=lambda card: card.rank)}


@contextmanager
def registered(card: ConnectorDescriptor) -> Generator[None]:
    """Has a card known without an entry point, in place of one of its name: to try a connector out, and for tests."""
    _registered.append(card)
    _look_again()
    try:
        yield
    finally:
        _registered.remove(card)
        _look_again()


def descriptor_of(name: ConnectorName) -> ConnectorDescriptor:
    """The card of a name; raises InvalidRequestError naming those known."""
    card = descriptors().get(name)
    if card is None:
        raise InvalidRequestError(
            f"unknown connector {name!r}; use one of {', '.join((AUTO, *descriptors()))}", reason="UNKNOWN_CONNECTOR"
        )
    return card


def number_of(name: ConnectorName) -> chunk_pb2.Connector.ValueType:
    """The wire's number of a name."""
    number = chunk_pb2.CONNECTOR_AUTO if name == AUTO else descriptor_of(name).number
    # The enum is open: an added connector's number travels like any other.
    return chunk_pb2.Connector.ValueType(number)


@cache
def name_of(number: int) -> ConnectorName:
    """The name of a number on the wire, AUTO for none; raises InvalidRequestError for one that is not known here."""
    if number in {chunk_pb2.CONNECTOR_UNSPECIFIED, chunk_pb2.CONNECTOR_AUTO}:
        return AUTO
    for card in descriptors().values():
        if card.number == number:
            return card.name
    raise InvalidRequestError(
        f"connector {number} is unknown here; install what adds it on both replicas", reason="UNKNOWN_CONNECTOR"
    )


def _check_added(added: Sequence[ConnectorDescriptor]) -> None:
    known = list(_BUILT_IN)
    for card in added:
        taken = any(card.name == other.name or card.number == other.number for other in known)
        if taken or card.name == AUTO or card.number < _FIRST_ADDED_NUMBER:
            raise NotReadyError(
                f"connector {card.name!r} cannot be added as number {card.number}: name and number must be its own, "
                f"the number from {_FIRST_ADDED_NUMBER} on; change its card, or uninstall what brings it",
                reason="CONNECTOR_CLASH",
            )
        known.append(card)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # The package that the module would be part of.
        return False


def _factory(card: ConnectorDescriptor) -> Callable[..., Connector]:
    module, _, attribute = card.factory.partition(":")
    try:
        factory: Callable[..., Connector] = getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        remedy = card.remedy or f"repair what {card.factory} needs"
        raise NotReadyError(
            f"connector {card.name} cannot be loaded: {exc}; {remedy}", reason="CONNECTOR_UNAVAILABLE"
        ) from exc
    return factory


def _look_again() -> None:
    descriptors.cache_clear()
    name_of.cache_clear()


class ReplicaConnectors:
    """One replica's connectors, each made when it is first needed."""

    def __init__(
        self, arena: Arena, *, landing: Callable[[], Awaitable[Arena]], replica: str, incarnation: str
    ) -> None:
        self._arena, self._landing = arena, landing
        self._replica, self._incarnation = replica, incarnation
        self._made: dict[ConnectorName, Connector] = {}

    def get(self, name: ConnectorName) -> Connector:
        """The connector of that name; raises NotReadyError (CONNECTOR_UNAVAILABLE) where this replica has none."""
        if name not in self._made:
            card = descriptor_of(name)
            missing = card.missing() or ("" if card.factory else "it reads no arena")
            if missing:
                raise NotReadyError(f"connector {name} cannot be used: {missing}", reason="CONNECTOR_UNAVAILABLE")
            self._made[name] = _factory(card)(
                self._arena, landing=self._landing, replica=self._replica, incarnation=self._incarnation
            )
        return self._made[name]

    async def close(self) -> None:
        """Closes those that were made. Closing twice is harmless."""
        while self._made:
            _, connector = self._made.popitem()
            await connector.close()
