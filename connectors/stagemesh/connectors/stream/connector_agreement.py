"""The agreement of two replicas on a connector, and the connectors of one replica."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field

from stagemesh.common.errors import InternalError, StagemeshError
from stagemesh.common.plugins.connectors import (
    AUTO,
    GRPC,
    ConnectorName,
    descriptor_of,
    descriptors,
    name_of,
    number_of,
)
from stagemesh.common.plugins.entry_points import import_factory
from stagemesh.common.tasks import end_tasks
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.base import Connector, unavailable
from stagemesh.connectors.packets import ConsumerAddress
from stagemesh.rpc.error_mapping import error_from_wire, error_to_wire
from stagemesh.v1 import stage_pb2

_OFFER_AGAIN_S = 2.0
_PAUSE_S = 5.0
"""The time in seconds after which a rejected connector is offered again.

Applies only to connectors that have worked before.
"""

_log = logging.getLogger(__name__)


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
                raise unavailable(f"connector {name} cannot be used: {missing}")
            try:
                factory: Callable[..., Connector] = import_factory(descriptor.factory)
            except (ImportError, AttributeError) as exc:
                remedy = descriptor.remedy or f"repair the installation of {descriptor.factory}"
                raise unavailable(f"connector {name} cannot be loaded: {exc}; {remedy}") from exc
            self._connectors[name] = factory(
                self._arena, landing=self._landing, replica=self._replica, incarnation=self._incarnation
            )
        return self._connectors[name]

    async def close(self) -> None:
        """Closes all created connectors. Idempotent."""
        while self._connectors:
            _, connector = self._connectors.popitem()
            await connector.close()


@dataclass
class Peer:
    """The consumer of a link. Also records the results of earlier connections to this consumer."""

    address: ConsumerAddress
    hello: stage_pb2.Hello
    """The Hello message that the producer sends first on every stream."""
    arena_fd: int | None
    """The file descriptor of the producer's arena, or None if the arena is private."""
    connectors: ReplicaConnectors
    """The connectors of this replica, the producer."""
    worked: set[ConnectorName] = field(default_factory=set[ConnectorName])
    """The connectors on which this replica and the consumer's current incarnation have agreed."""
    local_failures: int = 0
    """The number of consecutive failed handshakes over the local socket."""

    def __str__(self) -> str:
        return str(self.address)

    @property
    def consumer(self) -> str:
        """The consumer's replica name."""
        return self.address.replica


class ConnectorAgreement:
    """The connectors on which this replica, the producer, and one consumer agree over the streams of one connection.

    A flow uses the most preferred connector that both replicas can use. The producer offers its arena through one
    connector at a time, in order of preference. The consumer answers whether it can read the arena through this
    connector. If a connector that has worked before fails or is rejected, the producer offers the connector again after
    _PAUSE_S seconds.
    """

    def __init__(
        self, peer: Peer, *, send_offer: Callable[[stage_pb2.PutItem], None], on_change: Callable[[], None]
    ) -> None:
        """Agrees on no connector until `choose` is called.

        Args:
            peer: The consumer. Connectors that have worked are added to its `worked`.
            send_offer: Sends an offer to the consumer.
            on_change: Called when `choose` may return another result.
        """
        self._peer, self._connectors = peer, peer.connectors
        self._send_offer, self._on_change = send_offer, on_change
        self._negotiated: dict[ConnectorName, Connector] = {}
        self._refused: dict[ConnectorName, StagemeshError] = {}
        self._offering: dict[ConnectorName, asyncio.Task[None]] = {}
        self._paused: dict[ConnectorName, asyncio.TimerHandle] = {}

    def choose(self, wanted: ConnectorName) -> ConnectorName | None:
        """Returns the connector for a flow, or None if the connector is being negotiated or will be offered again.

        `wanted` is the requested connector or AUTO. Raises NotReadyError (CONNECTOR_UNAVAILABLE) if the requested
        connector cannot be used.
        """
        for name in self._candidates(wanted):
            if name == GRPC or name in self._negotiated:
                return name
            if name not in self._refused:
                if name not in self._offering:
                    self._offering[name] = asyncio.create_task(self._keep_offering(name), name=f"offer {name}")
                return None
        if wanted in self._paused:
            return None
        raise unavailable(
            f"connector {wanted} cannot be used with replica {self._peer.consumer}: {self._refused[wanted].message}; "
            "fix that, or set `connector: auto`"
        ) from self._refused[wanted]

    def reader(self, name: ConnectorName) -> Connector | None:
        """Returns this replica's instance of the negotiated connector `name`, or None if `name` is grpc."""
        return self._negotiated.get(name)

    def answer(self, offer_answer: stage_pb2.OfferAnswer) -> None:
        """Processes `offer_answer`, the consumer's answer to the offer of a connector.

        Does nothing if no offer of this connector is pending.
        """
        name = next((name for name in self._offering if number_of(name) == offer_answer.connector), None)
        if name is None:
            return
        self._offering.pop(name).cancel()
        if offer_answer.HasField("error"):
            self._refuse(name, error_from_wire(offer_answer.error))
        else:
            self._negotiated[name] = self._connectors.get(name)
            self._peer.worked.add(name)
        self._on_change()

    def fail(self, name: ConnectorName, error: StagemeshError) -> None:
        """Stops using the connector `name`, which has failed with `error`.

        Does nothing if the connector has not been negotiated.
        """
        if self._negotiated.pop(name, None) is not None:
            self._refuse(name, error)

    def refuse_all(self, cause: str) -> None:
        """Prevents the use of all connectors except grpc on this connection."""
        self._refused = {name: unavailable(cause) for name in descriptors() if name != GRPC}

    def probe(self, wanted: ConnectorName) -> EdgeProbe | None:
        """Returns the connector that `choose` selects, and the preferred connectors that were rejected.

        Returns None while the connector is being negotiated or will be offered again. Raises NotReadyError under the
        same conditions as `choose`.
        """
        chosen = self.choose(wanted)
        if chosen is None:
            return None
        better = {name: self._refused[name] for name in self._candidates(wanted) if name in self._refused}
        return EdgeProbe(chosen, better)

    async def close(self) -> None:
        """Cancels all offers and pauses. Idempotent."""
        for pause in self._paused.values():
            pause.cancel()
        await end_tasks(self._offering.values())

    # -- inner workings

    @staticmethod
    def _candidates(wanted: ConnectorName) -> Iterator[ConnectorName]:
        yield from descriptors() if wanted == AUTO else (wanted,)

    def _refuse(self, name: ConnectorName, error: StagemeshError) -> None:
        self._refused[name] = error
        if name in self._peer.worked:
            # A temporary failure, such as a short network outage, may end soon. Flows that request this connector wait.
            self._paused[name] = asyncio.get_running_loop().call_later(_PAUSE_S, self._end_pause, name)

    def _end_pause(self, name: ConnectorName) -> None:
        del self._paused[name], self._refused[name]
        self._on_change()

    async def _keep_offering(self, name: ConnectorName) -> None:
        """Sends an offer of a connector every _OFFER_AGAIN_S seconds, because an offer may be lost.

        The task of this method is cancelled when the consumer answers.
        """
        try:
            offer = await self._connectors.get(name).offer()
        except Exception as exc:  # noqa: BLE001 - the task's outermost code, and another package may have installed it
            if not isinstance(exc, StagemeshError):
                _log.exception("connector %s failed with an unexpected error", name)
                exc = InternalError(f"connector {name} failed: a {type(exc).__name__}; the replica's log has the cause")
            del self._offering[name]
            self._refuse(name, exc)
            self._on_change()
            return
        item = stage_pb2.PutItem(offer=stage_pb2.Offer(connector=number_of(name), offer=offer, name=name))
        while True:
            self._send_offer(item)
            await asyncio.sleep(_OFFER_AGAIN_S)
