"""Descriptors of the built-in connectors and of connectors that other packages add.

Other packages add connectors as entry points in the group `stagemesh.connectors`. Each entry point refers to a
`ConnectorDescriptor`. This module imports neither connectors nor the libraries that connectors need.
"""

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.metadata import entry_points
from importlib.util import find_spec
from typing import TypeAlias

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.v1 import chunk_pb2

ConnectorName: TypeAlias = str
"""The name of a connector in pipeline files, the CLI and metrics. A connector transfers the tensors of an edge.

The name AUTO stands for the usable connector with the lowest rank.
"""

AUTO, SHM, NIXL, GRPC = "auto", "shm", "nixl", "grpc"

_FIRST_ADDED_NUMBER = 1000


@dataclass(frozen=True)
class ConnectorDescriptor:
    """A description of a connector. Loading the description does not import the connector."""

    name: ConnectorName
    number: int
    """The connector's value in the protobuf enum `Connector`. At least 1000 for a connector of another package."""
    rank: int
    """The connector's position in the order of preference: 10 for shm, 20 for nixl and 100 for grpc.

    `connector: auto` selects the usable connector with the lowest rank.
    """
    factory: str = ""
    """The callable that creates the `Connector`, as "module:callable". Empty only for grpc, which has no `Connector`.

    The callable's arguments are the arena, and the keyword arguments `landing`, `replica` and `incarnation`.
    """
    module: str = ""
    """The name of the Python module that the connector needs, or "" if the connector needs no additional module."""
    remedy: str = ""
    """An instruction that tells the user how to install `module`, for use in error messages."""

    def missing(self) -> str:
        """Returns the reason why this installation cannot use the connector, or "" if the connector is usable."""
        return "" if not self.module or _is_installed(self.module) else f"{self.module} is not installed: {self.remedy}"


_BUILT_IN = (
    ConnectorDescriptor(SHM, chunk_pb2.CONNECTOR_SHM, 10, "stagemesh.connectors.shm:ShmConnector"),
    ConnectorDescriptor(
        NIXL,
        chunk_pb2.CONNECTOR_NIXL,
        20,
        "stagemesh.connectors.nixl.connector:NixlConnector",
        module="nixl_cu12",
        remedy="run pip install 'stagemesh[nixl]' on both hosts",
    ),
    ConnectorDescriptor(GRPC, chunk_pb2.CONNECTOR_GRPC, 100),
)
_registered: list[ConnectorDescriptor] = []


@cache
def descriptors() -> Mapping[ConnectorName, ConnectorDescriptor]:
    """Returns the descriptors of all connectors by connector name, in ascending order of rank.

    Raises NotReadyError (CONNECTOR_CLASH) if another package's connector has a number below 1000, or a name or number
    that another connector already has.
    """
    added = [entry.load() for entry in entry_points(group="stagemesh.connectors")]
    _check_added(added)
    by_name = {descriptor.name: descriptor for descriptor in (*_BUILT_IN, *added, *_registered)}
    return {each.name: each for each in sorted(by_name.values(), key=lambda each: each.rank)}


@contextmanager
def registered(descriptor: ConnectorDescriptor) -> Generator[None]:
    """Registers a connector without an entry point until the `with` block ends.

    The connector replaces any connector with the same name.
    """
    _registered.append(descriptor)
    descriptors.cache_clear()
    try:
        yield
    finally:
        _registered.remove(descriptor)
        descriptors.cache_clear()


def descriptor_of(name: ConnectorName) -> ConnectorDescriptor:
    """Returns the descriptor of the connector `name`.

    Raises InvalidRequestError (UNKNOWN_CONNECTOR) if there is no such connector. The message lists all connector names.
    """
    descriptor = descriptors().get(name)
    if descriptor is None:
        raise InvalidRequestError(
            f"unknown connector {name!r}; use one of {', '.join((AUTO, *descriptors()))}", reason="UNKNOWN_CONNECTOR"
        )
    return descriptor


def number_of(name: ConnectorName) -> chunk_pb2.Connector.ValueType:
    """Returns the value of the connector `name` in the protobuf enum `Connector`.

    Raises InvalidRequestError (UNKNOWN_CONNECTOR) if there is no such connector.
    """
    number = chunk_pb2.CONNECTOR_AUTO if name == AUTO else descriptor_of(name).number
    # The protobuf enum is open, so it can also carry the numbers of connectors that other packages add.
    return chunk_pb2.Connector.ValueType(number)


def shown_name(number: int) -> str:
    """Returns the name of a connector for people, or its number if no package adds it here."""
    try:
        return name_of(number)
    except InvalidRequestError:
        return f"connector {number}"


def name_of(number: int) -> ConnectorName:
    """Returns the name of the connector whose value in the protobuf enum `Connector` is `number`.

    Returns AUTO if `number` is CONNECTOR_AUTO. Raises InvalidRequestError (UNKNOWN_CONNECTOR) if there is no such
    connector.
    """
    if number == chunk_pb2.CONNECTOR_AUTO:
        return AUTO
    for descriptor in descriptors().values():
        if descriptor.number == number:
            return descriptor.name
    raise InvalidRequestError(
        f"connector {number} is unknown here; install the package that adds it on both replicas",
        reason="UNKNOWN_CONNECTOR",
    )


def _check_added(added: Sequence[ConnectorDescriptor]) -> None:
    known = list(_BUILT_IN)
    for descriptor in added:
        is_used = any(descriptor.name == other.name or descriptor.number == other.number for other in known)
        if is_used or descriptor.name == AUTO or descriptor.number < _FIRST_ADDED_NUMBER:
            raise NotReadyError(
                f"connector {descriptor.name!r} cannot be added as number {descriptor.number}: its name and number "
                f"must be unique and the number at least {_FIRST_ADDED_NUMBER}; change its descriptor, or uninstall "
                "the package that adds it",
                reason="CONNECTOR_CLASH",
            )
        known.append(descriptor)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:
        # The module's parent package is not installed.
        return False
