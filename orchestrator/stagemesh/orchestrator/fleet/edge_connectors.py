"""By which connector each edge crosses, between replicas that it joins.

A link's producer is asked once both ends are ready, and again when one of them has been away. A fixed connector that
cannot work shows here, before any request does. Each replica is linked to a few of those that it may meet: all of them
in a small pipeline; in a large one the pairs would be many, and the others are no different.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Sequence

from stagemesh.common.connector_descriptors import AUTO
from stagemesh.common.errors import DeadlineError, NotReadyError, StagemeshError, UnavailableError, make_error
from stagemesh.connectors.stream.negotiation import EdgeProbe
from stagemesh.orchestrator.fleet.random_pool import RandomPool
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.spec import Edge

_log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 3.0
_FIRST_AGAIN_S, _LAST_AGAIN_S = 1.0, 16.0
_AT_ONCE = 16
"""Probes under way."""
PARTNERS = 4
"""Replicas on an edge's other side that a replica is linked to when it becomes ready."""


class EdgeLink:
    """An edge between two replicas, and what its producer last said of it."""

    def __init__(self, edge: Edge, *, producer: Replica, consumer: Replica) -> None:
        self.edge, self.producer, self.consumer = edge, producer, consumer
        self.probe: EdgeProbe | None = None
        self.error: StagemeshError | None = None
        self.again_s = _FIRST_AGAIN_S

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
    """The links of all edges between the replicas that are ready. `keep` has them asked."""

    def __init__(self, edges: Sequence[Edge], *, partners: int = PARTNERS, rng: random.Random | None = None) -> None:
        self._edges = edges
        self._partners = partners
        self._rng = rng or random.Random()  # noqa: S311
        self._ready: dict[tuple[str, str], RandomPool[Replica]] = {}
        self._links: dict[str, dict[tuple[Replica, Replica], EdgeLink]] = {edge.name: {} for edge in edges}
        self._by_replica: dict[Replica, dict[EdgeLink, None]] = {}
        self._settled: dict[str, set[EdgeLink]] = {edge.name: set() for edge in edges}
        self._refused: dict[str, set[EdgeLink]] = {edge.name: set() for edge in edges}
        self._to_ask: asyncio.Queue[EdgeLink] = asyncio.Queue()

    @property
    def ready(self) -> bool:
        """Whether requests may go over every edge: one of its links is known to work, and none is refused.

        A replica that joins those which serve holds nothing up.
        """
        return all(self._settled[edge.name] and not self._refused[edge.name] for edge in self._edges)

    def of(self, edge: Edge) -> list[EdgeLink]:
        """An edge's links."""
        return list(self._links[edge.name].values())

    def check(self, edges: Collection[Edge]) -> None:
        """Raises NotReadyError (CONNECTOR_UNAVAILABLE) where one of the edges cannot be crossed."""
        for edge in edges:
            for link in self._refused[edge.name]:
                assert link.error is not None, "it is refused with an error"
                raise NotReadyError(link.error.message, reason="CONNECTOR_UNAVAILABLE", metadata=link.error.metadata)

    def joined(self, replica: Replica) -> None:
        """A replica has become ready."""
        self._ready.setdefault((replica.stage, replica.generation), RandomPool()).add(replica)
        for edge in self._edges:
            if replica.stage in (edge.producer, edge.consumer):
                self._join(edge, replica)

    def left(self, replica: Replica) -> None:
        """A replica is no longer ready; harmless where it was not."""
        kind = (replica.stage, replica.generation)
        self._ready.get(kind, RandomPool()).discard(replica)
        if not self._ready.get(kind):
            self._ready.pop(kind, None)
        for link in self._by_replica.pop(replica, {}):
            self._drop(link)
            other = link.consumer if link.producer is replica else link.producer
            self._by_replica[other].pop(link)
            if not any(each.edge is link.edge for each in self._by_replica[other]):
                self._join(link.edge, other)

    async def keep(self, *, on_change: Callable[[], None]) -> None:
        """Asks about every new link, and again while nothing is known; never ends by itself."""
        async with asyncio.TaskGroup() as group:
            for _ in range(_AT_ONCE):
                group.create_task(self._ask(on_change))

    # -- inner workings

    async def _ask(self, on_change: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            link = await self._to_ask.get()
            if not self._is_current(link):
                continue
            await link.ask()
            if not self._is_current(link):
                continue
            _keep_in(self._settled[link.edge.name], link, member=link.is_settled)
            _keep_in(self._refused[link.edge.name], link, member=link.is_refused)
            if link.probe is None:
                loop.call_later(link.again_s, self._to_ask.put_nowait, link)
                link.again_s = min(_LAST_AGAIN_S, 2 * link.again_s)
            on_change()

    def _is_current(self, link: EdgeLink) -> bool:
        return self._links[link.edge.name].get((link.producer, link.consumer)) is link

    def _join(self, edge: Edge, replica: Replica) -> None:
        produces = replica.stage == edge.producer
        other_side = (edge.consumer if produces else edge.producer, replica.generation)
        for other in self._ready.get(other_side, RandomPool()).draw(self._partners, self._rng):
            producer, consumer = (replica, other) if produces else (other, replica)
            self._add(EdgeLink(edge, producer=producer, consumer=consumer))

    def _add(self, link: EdgeLink) -> None:
        links = self._links[link.edge.name]
        if (link.producer, link.consumer) not in links:
            links[link.producer, link.consumer] = link
            for replica in (link.producer, link.consumer):
                self._by_replica.setdefault(replica, {})[link] = None
            self._to_ask.put_nowait(link)

    def _drop(self, link: EdgeLink) -> None:
        del self._links[link.edge.name][link.producer, link.consumer]
        self._settled[link.edge.name].discard(link)
        self._refused[link.edge.name].discard(link)


def _keep_in(links: set[EdgeLink], link: EdgeLink, *, member: bool) -> None:
    (links.add if member else links.discard)(link)
