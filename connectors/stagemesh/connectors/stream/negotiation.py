"""Negotiates, once per connection, which connector a flow uses: the best one that both replicas can use.

The producer offers its arena by one connector after the other. The consumer answers whether it can read the arena that
way. A connector that fails later, or that is refused although it has worked before, is offered again after a pause.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from stagemesh.common.connector_descriptors import AUTO, GRPC, ConnectorName, descriptors, name_of, number_of
from stagemesh.common.errors import InternalError, NotReadyError, StagemeshError
from stagemesh.connectors.base import Connector
from stagemesh.connectors.replica_connectors import ReplicaConnectors
from stagemesh.connectors.stream import wire
from stagemesh.v1 import stage_pb2

_OFFER_AGAIN_S = 2.0
_PAUSE_S = 5.0
"""Pause after which a connector that has worked before is offered again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EdgeProbe:
    """The connector of an edge between two replicas."""

    connector: ConnectorName
    refusals: Mapping[ConnectorName, StagemeshError]
    """Better connectors, with the errors because of which they cannot be used."""


class Negotiation:
    """The connectors of one connection. Used on the event loop; calls `on_negotiated` after each answer."""

    def __init__(
        self,
        connectors: ReplicaConnectors,
        *,
        consumer: str,
        offer: Callable[[stage_pb2.PutItem], None],
        on_negotiated: Callable[[], None],
    ) -> None:
        self._connectors = connectors
        self._consumer = consumer
        self._offer, self._on_negotiated = offer, on_negotiated
        self._negotiated: dict[ConnectorName, Connector] = {}
        self._refused: dict[ConnectorName, StagemeshError] = {}
        self._offering: dict[ConnectorName, asyncio.Task[None]] = {}
        self.worked: set[ConnectorName] = set()
        """The connectors negotiated with this consumer, over this connection or an earlier one."""
        self._paused: dict[ConnectorName, asyncio.TimerHandle] = {}

    def choose(self, wanted: ConnectorName) -> ConnectorName | None:
        """Returns the connector for a flow, or None while it is being negotiated.

        Raises NotReadyError (CONNECTOR_UNAVAILABLE) if the wanted connector cannot work.
        """
        for name in self._candidates(wanted):
            if name == GRPC or name in self._negotiated:
                return name
            if name not in self._refused:
                self._begin(name)
                return None
        if wanted in self._paused:
            return None
        raise NotReadyError(
            f"connector {wanted} cannot be used with replica {self._consumer}: {self._refused[wanted].message}; "
            "fix that, or set `connector: auto`",
            reason="CONNECTOR_UNAVAILABLE",
        ) from self._refused[wanted]

    def reader(self, name: ConnectorName) -> Connector | None:
        """Returns this replica's object of a negotiated connector; None for grpc."""
        return self._negotiated.get(name)

    def answer(self, meeting: stage_pb2.Meeting) -> None:
        """Applies the consumer's answer to an offer."""
        name = next((name for name in self._offering if number_of(name) == meeting.connector), None)
        if name is None:
            return
        self._offering.pop(name).cancel()
        if meeting.HasField("error"):
            self._refuse(name, wire.error_from_wire(meeting.error))
        else:
            self._negotiated[name] = self._connectors.get(name)
            self.worked.add(name)
        self._on_negotiated()

    def fail(self, name: ConnectorName, error: StagemeshError) -> None:
        """Stops using a negotiated connector that has failed."""
        if self._negotiated.pop(name, None) is not None:
            self._refuse(name, error)

    def probe(self, wanted: ConnectorName) -> EdgeProbe | None:
        """Returns the same as `choose`, with the better connectors that were refused."""
        chosen = self.choose(wanted)
        if chosen is None:
            return None
        better = {name: self._refused[name] for name in self._candidates(wanted) if name in self._refused}
        return EdgeProbe(chosen, better)

    async def close(self) -> None:
        """Ends all offers. Closing twice is harmless."""
        for pause in self._paused.values():
            pause.cancel()
        tasks = list(self._offering.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inner workings

    @staticmethod
    def _candidates(wanted: ConnectorName) -> Iterator[ConnectorName]:
        yield from descriptors() if wanted == AUTO else (wanted,)

    def _refuse(self, name: ConnectorName, error: StagemeshError) -> None:
        self._refused[name] = error
        if name in self.worked:
            # A passing failure, such as a moment without network, may be over soon. Flows that want this name wait.
            self._paused[name] = asyncio.get_running_loop().call_later(_PAUSE_S, self._end_pause, name)

    def _end_pause(self, name: ConnectorName) -> None:
        del self._paused[name], self._refused[name]
        self._on_negotiated()

    def _begin(self, name: ConnectorName) -> None:
        if name not in self._offering:
            self._offering[name] = asyncio.create_task(self._keep_offering(name), name=f"offer {name}")

    def _cannot_offer(self, name: ConnectorName, error: StagemeshError) -> None:
        del self._offering[name]
        self._refuse(name, error)
        self._on_negotiated()

    async def _keep_offering(self, name: ConnectorName) -> None:
        """Repeats the offer until the answer ends this task, because an offer may be lost."""
        try:
            offer = await self._connectors.get(name).offer()
        except StagemeshError as exc:
            self._cannot_offer(name, exc)
            return
        except Exception as exc:  # noqa: BLE001 - the task's outermost edge, and the connector may be an installed one
            _log.exception("connector %s failed with an error that is not its own", name)
            self._cannot_offer(name, InternalError(f"connector {name} failed: {type(exc).__name__}: {exc}"))
            return
        item = stage_pb2.PutItem(offer=stage_pb2.Offer(connector=number_of(name), offer=offer))
        while True:
            self._offer(item)
            await asyncio.sleep(_OFFER_AGAIN_S)


def probe_to_wire(probe: EdgeProbe) -> stage_pb2.ProbeEdgeResponse:
    """Returns the message of a probe."""
    return stage_pb2.ProbeEdgeResponse(
        connector=number_of(probe.connector),
        refusals=[
            stage_pb2.ConnectorRefusal(connector=number_of(name), error=wire.error_to_wire(error))
            for name, error in probe.refusals.items()
        ],
    )


def probe_from_wire(message: stage_pb2.ProbeEdgeResponse) -> EdgeProbe:
    """Returns the probe of a message; raises InvalidRequestError for an unknown connector."""
    refusals = {name_of(refusal.connector): wire.error_from_wire(refusal.error) for refusal in message.refusals}
    return EdgeProbe(name_of(message.connector), refusals)
