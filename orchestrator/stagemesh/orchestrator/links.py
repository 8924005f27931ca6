"""By which connector each edge crosses, for each pair of replicas that it joins.

A link's producer is asked once both ends are ready, and again when one of them has been away. A fixed connector that
cannot work shows here, before any request does.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from stagemesh.connectors.base import AUTO
from stagemesh.connectors.errors import DeadlineError, NotReadyError, StagemeshError, UnavailableError, make_error
from stagemesh.connectors.negotiation import EdgeProbe
from stagemesh.connectors.pulse import Pulse
from stagemesh.orchestrator.replica import Replica, ReplicaState
from stagemesh.orchestrator.spec import Edge

_log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 3.0
_AGAIN_S = 1.0


class EdgeLink:
    """An edge between two replicas, and what its producer last said of it."""

    def __init__(self, edge: Edge, *, producer: Replica, consumer: Replica) -> None:
        self.edge, self.producer, self.consumer = edge, producer, consumer
        self.probe: EdgeProbe | None = None
        self.error: StagemeshError | None = None

    @property
    def is_up(self) -> bool:
        """Whether both replicas are ready."""
        return self.producer.state is self.consumer.state is ReplicaState.READY

    @property
    def is_settled(self) -> bool:
        """Whether nothing more need be known: `auto` finds a way also where the question was lost."""
        return self.probe is not None or (self.error is not None and self.edge.connector == AUTO)

    @property
    def is_refused(self) -> bool:
        """Whether the edge's connector is a fixed one that cannot work."""
        passing = self.error is None or isinstance(self.error, UnavailableError | DeadlineError)
        return self.edge.connector != AUTO and not passing

    async def ask(self) -> None:
        """Has the producer say what it would use."""
        found: EdgeProbe | None = None
        error: StagemeshError | None = None
        try:
            found = await self.producer.client.probe_edge(
                self.edge.name,
                consumer=self.consumer.name,
                endpoint=self.consumer.endpoint,
                connector=self.edge.connector,
                timeout_s=_PROBE_TIMEOUT_S,
            )
        except StagemeshError as exc:
            error = self._located(exc)
        self._take(found, error)

    def forget(self) -> None:
        """One of its ends has gone."""
        self.probe = self.error = None

    def _take(self, found: EdgeProbe | None, error: StagemeshError | None) -> None:
        if error is not None and (self.error is None or self.error.message != error.message):
            _log.warning("%s", error.message)
        if found is not None and found != self.probe:
            ends = (self.edge.name, self.producer.name, self.consumer.name)
            _log.info("edge %s from %s to %s uses %s", *ends, found.connector)
        self.probe, self.error = found, error

    def _located(self, error: StagemeshError) -> StagemeshError:
        producer, consumer = self.producer.name, self.consumer.name
        return make_error(
            error.code,
            f"edge {self.edge.name} from {producer} to {consumer}: {error.message}",
            reason=error.reason,
            metadata={"edge": self.edge.name, "producer": producer, "consumer": consumer},
        )


class EdgeLinks:
    """The links of all edges, each kept known by its `keep`."""

    def __init__(self, edges: Sequence[Edge]) -> None:
        self._edges = edges
        self._links: list[EdgeLink] = []
        self._changed = Pulse()

    @property
    def ready(self) -> bool:
        """Whether requests may go over every edge: one of its links is known to work, and none is refused.

        A replica that joins those which serve holds nothing up.
        """
        return all(_may_cross(self.of(edge)) for edge in self._edges)

    def join(self, replicas: Mapping[str, Sequence[Replica]]) -> Sequence[EdgeLink]:
        """The links that join these replicas, by stage."""
        self._links = [
            EdgeLink(edge, producer=producer, consumer=consumer)
            for edge in self._edges
            for producer in replicas.get(edge.producer, ())
            for consumer in replicas.get(edge.consumer, ())
        ]
        return self._links

    def of(self, edge: Edge) -> list[EdgeLink]:
        """An edge's links between replicas that are ready."""
        return [link for link in self._links if link.edge is edge and link.is_up]

    def check(self, edges: Collection[Edge]) -> None:
        """Raises NotReadyError (CONNECTOR_UNAVAILABLE) where one of the edges cannot be crossed."""
        for link in self._links:
            if link.is_up and link.is_refused and link.edge in edges:
                assert link.error is not None, "it is refused with an error"
                raise NotReadyError(link.error.message, reason="CONNECTOR_UNAVAILABLE", metadata=link.error.metadata)

    def replica_changed(self) -> None:
        """The state of a replica is another one."""
        self._changed.fire()

    async def keep(self, link: EdgeLink, *, on_change: Callable[[], None]) -> None:
        """Asks whenever both ends have become ready, and again while nothing is known; never ends by itself."""
        while True:
            while not link.is_up:
                await self._changed.wait()
            await link.ask()
            on_change()
            try:
                async with asyncio.timeout(None if link.probe else _AGAIN_S):
                    while link.is_up:
                        await self._changed.wait()
            except TimeoutError:
                continue
            link.forget()


def _may_cross(links: Sequence[EdgeLink]) -> bool:
    return any(link.is_settled for link in links) and not any(link.is_refused for link in links)
