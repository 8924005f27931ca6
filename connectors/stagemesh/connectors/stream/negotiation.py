"""Which connector a flow uses: settled once a connection, the best that both replicas can do.

The producer offers its arena by one connector after the other, and the consumer answers whether it can read it so.
A connector that fails later, or is refused though it has worked before, is tried again after a pause.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from stagemesh.common.connector_descriptors import AUTO, GRPC, ConnectorName, descriptors, number_of
from stagemesh.common.errors import InternalError, NotReadyError, StagemeshError
from stagemesh.connectors.base import Connector
from stagemesh.connectors.replica_connectors import ReplicaConnectors
from stagemesh.connectors.stream import wire
from stagemesh.v1 import stage_pb2

_AGAIN_S = 2.0
_PAUSE_S = 5.0
"""After this long a connector that has worked is tried again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EdgeProbe:
    """What carries an edge between two replicas."""

    connector: ConnectorName
    refusals: Mapping[ConnectorName, StagemeshError]
    """Better connectors, and why they cannot be used."""


class Negotiation:
    """One connection's. Used on the event loop; whoever waits for it is told by `settled`."""

    def __init__(
        self,
        connectors: ReplicaConnectors,
        *,
        consumer: str,
        offer: Callable[[stage_pb2.PutItem], None],
        settled: Callable[[], None],
    ) -> None:
        self._connectors = connectors
        self._consumer = consumer
        self._offer, self._settled = offer, settled
        self._agreed: dict[ConnectorName, Connector] = {}
        self._refused: dict[ConnectorName, StagemeshError] = {}
        self._offering: dict[ConnectorName, asyncio.Task[None]] = {}
        self.worked: set[ConnectorName] = set()
        """Those that have been agreed on with this consumer, also over an earlier connection."""
        self._paused: dict[ConnectorName, asyncio.TimerHandle] = {}

    def choose(self, wanted: ConnectorName) -> ConnectorName | None:
        """The connector for a flow, or None while that is being settled.

        Raises NotReadyError (CONNECTOR_UNAVAILABLE) where the one that is wanted cannot work.
        """
        for name in self._candidates(wanted):
            if name == GRPC or name in self._agreed:
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
        """This replica's end of a connector that was agreed on; None for grpc."""
        return self._agreed.get(name)

    def meet(self, meeting: stage_pb2.Meeting) -> None:
        """The consumer's answer to an offer."""
        name = next((name for name in self._offering if number_of(name) == meeting.connector), None)
        if name is None:
            return
        self._offering.pop(name).cancel()
        if meeting.HasField("error"):
            self._refuse(name, wire.error_from_wire(meeting.error))
        else:
            self._agreed[name] = self._connectors.get(name)
            self.worked.add(name)
        self._settled()

    def fail(self, name: ConnectorName, error: StagemeshError) -> None:
        """A connector that was agreed on does not work."""
        if self._agreed.pop(name, None) is not None:
            self._refuse(name, error)

    def probe(self, wanted: ConnectorName) -> EdgeProbe | None:
        """The same as `choose`, with what was passed over."""
        chosen = self.choose(wanted)
        if chosen is None:
            return None
        better = {name: self._refused[name] for name in self._candidates(wanted) if name in self._refused}
        return EdgeProbe(chosen, better)

    async def close(self) -> None:
        """Forgets what was settled."""
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
            # What failed in passing, for a moment without network say, may work again; a fixed choice waits for that.
            self._paused[name] = asyncio.get_running_loop().call_later(_PAUSE_S, self._forgive, name)

    def _forgive(self, name: ConnectorName) -> None:
        del self._paused[name], self._refused[name]
        self._settled()

    def _begin(self, name: ConnectorName) -> None:
        if name not in self._offering:
            self._offering[name] = asyncio.create_task(self._keep_offering(name), name=f"offer {name}")

    def _cannot_offer(self, name: ConnectorName, error: StagemeshError) -> None:
        del self._offering[name]
        self._refuse(name, error)
        self._settled()

    async def _keep_offering(self, name: ConnectorName) -> None:
        """Offers until the answer ends this task, for an offer may be lost."""
        try:
            offer = await self._connectors.get(name).offer()
        except StagemeshError as exc:
            self._cannot_offer(name, exc)
            return
        except Exception as exc:  # noqa: BLE001 - the task's outermost edge, and the connector may be anybody's
            _log.exception("connector %s failed in a way that it does not name", name)
            self._cannot_offer(name, InternalError(f"connector {name} failed: {type(exc).__name__}: {exc}"))
            return
        item = stage_pb2.PutItem(offer=stage_pb2.Offer(connector=number_of(name), offer=offer))
        while True:
            self._offer(item)
            await asyncio.sleep(_AGAIN_S)
