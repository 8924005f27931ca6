"""Determines which connector each edge uses between each pair of replicas.

When both replicas of a pair become ready, the orchestrator asks the producer for the connector that the pair would use.
A connector that is fixed in the pipeline file but cannot work is therefore detected before a request needs it. Each
replica is linked to at most `PARTNERS` replicas of the adjacent stage, because a large pipeline has too many pairs, and
the pairs of an edge behave alike.

A replica receives no requests (`Replica.hold_for_connector`) if the fixed connector of one of its edges cannot work or
has not been probed. This applies only if its stage has another usable replica. If the stage has no other usable
replica, requests that need the edge fail with CONNECTOR_UNAVAILABLE.

An edge with the fixed connector `shm` links only replicas on one host, and the planner chooses both ends on one host.
Therefore each pod of a colocation group serves by itself.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Iterable, Sequence

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import DeadlineError, NotReadyError, StagemeshError, UnavailableError, error_class
from stagemesh.common.plugins.connectors import AUTO, SHM
from stagemesh.connectors.stream.connector_agreement import EdgeProbe
from stagemesh.orchestrator.fleet.replica import Hold, Replica
from stagemesh.orchestrator.fleet.replica_registry import RandomPools
from stagemesh.pipeline import Edge

_log = logging.getLogger(__name__)

_PROBE_TIMEOUT_S = 3.0
_PAUSES = Backoff(first_s=1.0, longest_s=16.0)
_MAX_PROBES = 16
"""The maximum number of concurrent probes."""
PARTNERS = 4
"""The maximum number of replicas of an adjacent stage to which a replica is linked when it becomes ready."""


class EdgeLink:
    """A pair of replicas that an edge connects, and the result of the last probe of its connector."""

    def __init__(self, edge: Edge, *, producer: Replica, consumer: Replica) -> None:
        self.edge, self.producer, self.consumer = edge, producer, consumer
        self.probe: EdgeProbe | None = None
        self.error: StagemeshError | None = None
        self.retries = _PAUSES.retries()

    @property
    def is_answered(self) -> bool:
        """Whether the link has been probed at least once, successfully or not."""
        return self.probe is not None or self.error is not None

    @property
    def is_usable(self) -> bool:
        """Whether requests may use the link.

        A link is usable if the probe found a connector. If the edge's connector is `auto`, a link is also usable after
        a failed probe, because the replicas then choose a connector when they connect.
        """
        return self.probe is not None or (self.error is not None and self.edge.connector == AUTO)

    @property
    def is_refused(self) -> bool:
        """Whether the pipeline file fixes the connector and the last probe showed that this connector cannot work."""
        temporary = self.error is None or isinstance(self.error, UnavailableError | DeadlineError)
        return self.edge.connector != AUTO and not temporary

    async def ask(self) -> None:
        """Probes the link: asks the producer for the connector that the link would use.

        Stores the answer in `probe`, or the error in `error`.
        """
        try:
            probe = await self.producer.client.probe_edge(
                self.edge.name, self.consumer.address, self.edge.connector, timeout_s=_PROBE_TIMEOUT_S
            )
        except StagemeshError as exc:
            error = error_class(exc.code, exc.reason)(
                f"{self}: {exc.message}",
                reason=exc.reason,
                metadata={"edge": self.edge.name, "producer": self.producer.name, "consumer": self.consumer.name},
            )
            if self.error is None or self.error.message != error.message:
                _log.warning("%s", error.message)
            self.probe, self.error = None, error
        else:
            if probe != self.probe:
                _log.info("%s uses %s", self, probe.connector)
            self.probe, self.error = probe, None

    def __str__(self) -> str:
        return f"edge {self.edge.name} from {self.producer.name} to {self.consumer.name}"


class EdgeConnectors:
    """Links the replicas of adjacent stages, and determines the connector of each link.

    The connectors are determined only while `probe_links` runs.
    """

    def __init__(self, edges: Sequence[Edge], *, partners: int = PARTNERS) -> None:
        self._edges = edges
        self._partners = partners
        self._rng = random.Random()  # noqa: S311
        self._pools: RandomPools[Replica] = RandomPools()
        """The replicas that other replicas can connect to, by stage name and generation, and also by their host."""
        self._links: dict[str, dict[tuple[Replica, Replica], EdgeLink]] = {edge.name: {} for edge in edges}
        self._by_replica: dict[Replica, dict[EdgeLink, None]] = {}
        """The links of each replica. The replica that joined first comes first."""
        self._usable: dict[str, set[EdgeLink]] = {edge.name: set() for edge in edges}
        self._refused: dict[str, set[EdgeLink]] = {edge.name: set() for edge in edges}
        self._held: set[Replica] = set()
        self._to_ask: asyncio.Queue[EdgeLink] = asyncio.Queue()

    def __contains__(self, replica: Replica) -> bool:
        return replica in self._by_replica

    def are_ready(self, edges: Iterable[Edge]) -> bool:
        """Returns whether requests may use these edges.

        Each edge needs at least one usable link, and no refused link between two replicas that receive requests. A
        replica that joins later does not make an edge unusable.
        """
        return all(self._usable[edge.name] and not self._blocking_links(edge) for edge in edges)

    def links_of(self, edge: Edge) -> list[EdgeLink]:
        return list(self._links[edge.name].values())

    def check(self, edges: Collection[Edge]) -> None:
        """Raises NotReadyError (CONNECTOR_UNAVAILABLE) if one of the edges has a fixed connector that cannot work."""
        for edge in edges:
            for link in self._blocking_links(edge):
                assert link.error is not None, "a refused link has an error"
                raise NotReadyError(link.error.message, reason="CONNECTOR_UNAVAILABLE", metadata=link.error.metadata)

    def join(self, replica: Replica) -> None:
        """Links a replica that has become ready to random replicas of the adjacent stages."""
        self._by_replica[replica] = {}
        for key in _pool_keys(replica):
            self._pools.add(key, replica)
        for edge in self._edges:
            if replica.stage in (edge.producer, edge.consumer):
                self._link(edge, replica)
        self._update_holds([replica])

    def leave(self, replica: Replica) -> None:
        """Removes the links of a replica that is no longer ready. Does nothing if the replica has no links."""
        for key in _pool_keys(replica):
            self._pools.discard(key, replica)
        affected = [replica]
        for link in self._by_replica.pop(replica, {}):
            self._drop(link)
            other = link.consumer if link.producer is replica else link.producer
            self._by_replica[other].pop(link)
            affected.append(other)
            if not any(each.edge is link.edge for each in self._by_replica[other]):
                self._link(link.edge, other)
        self._update_holds(affected)

    async def probe_links(self, *, on_change: Callable[[], None]) -> None:
        """Probes every new link, and repeats the probe until the link's connector is known. Runs until it is cancelled.

        `on_change` is called after each probe.
        """
        async with asyncio.TaskGroup() as group:
            for _ in range(_MAX_PROBES):
                group.create_task(self._probe_next(on_change))

    async def _probe_next(self, on_change: Callable[[], None]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            link = await self._to_ask.get()
            if not self._is_current(link):
                continue
            await link.ask()
            if not self._is_current(link):
                continue
            _set_member(self._usable[link.edge.name], link, member=link.is_usable)
            _set_member(self._refused[link.edge.name], link, member=link.is_refused)
            if link.probe is None:
                loop.call_later(link.retries.next_s(), self._to_ask.put_nowait, link)
            self._update_holds([link.producer, link.consumer])
            on_change()

    # -- links

    def _is_current(self, link: EdgeLink) -> bool:
        return self._links[link.edge.name].get((link.producer, link.consumer)) is link

    def _link(self, edge: Edge, replica: Replica) -> None:
        produces = replica.stage == edge.producer
        host = (replica.host,) if edge.connector == SHM and replica.host else ()
        other_side = (edge.consumer if produces else edge.producer, replica.generation, *host)
        for other in self._pools[other_side].draw(self._partners, self._rng):
            producer, consumer = (replica, other) if produces else (other, replica)
            self._add(EdgeLink(edge, producer=producer, consumer=consumer))

    def _add(self, link: EdgeLink) -> None:
        links = self._links[link.edge.name]
        if (link.producer, link.consumer) not in links:
            links[link.producer, link.consumer] = link
            for replica in (link.producer, link.consumer):
                self._by_replica[replica][link] = None
            self._to_ask.put_nowait(link)

    def _drop(self, link: EdgeLink) -> None:
        del self._links[link.edge.name][link.producer, link.consumer]
        self._usable[link.edge.name].discard(link)
        self._refused[link.edge.name].discard(link)

    def _blocking_links(self, edge: Edge) -> list[EdgeLink]:
        return [link for link in self._refused[edge.name] if not {link.producer, link.consumer} & self._held]

    # -- replicas that receive no requests

    def _update_holds(self, changed: Iterable[Replica]) -> None:
        """Stops requests to replicas without a working connector, and allows requests to the other replicas again.

        Updates the replicas in `changed` and all replicas that receive no requests before or after the update.
        """
        unusable = self._find_unusable() if any(self._refused.values()) else {}
        for replica in {*changed, *self._held, *unusable}:
            if replica in unusable:
                self._held.add(replica)
                if replica.detail != unusable[replica]:
                    _log.warning("replica %s receives no requests: %s", replica.name, unusable[replica])
                replica.hold_for_connector(Hold.NO_CONNECTOR, unusable[replica])
            elif replica in self and (why := self._find_unknown(replica)):
                self._held.add(replica)
                replica.hold_for_connector(Hold.CONNECTOR_UNKNOWN, why)
            else:
                self._held.discard(replica)
                replica.hold_for_connector(None)

    def _find_unusable(self) -> dict[Replica, str]:
        """Returns the replicas that must receive no requests because of refused links, each with the reason.

        For each refused link, requests are withheld from one of its two replicas. If the replica that joined later has
        a substitute, requests are withheld from that replica. Otherwise, they are withheld from the replica that joined
        earlier, if this replica has a substitute.
        """
        order = {replica: number for number, replica in enumerate(self._by_replica)}
        refused: list[tuple[Replica, Replica, EdgeLink]] = []
        for link in (link for links in self._refused.values() for link in links):
            earlier, later = sorted((link.producer, link.consumer), key=order.__getitem__)
            refused.append((earlier, later, link))
        unusable: dict[Replica, str] = {}
        for earlier, later, link in sorted(refused, key=lambda each: order[each[1]]):
            if earlier in unusable or later in unusable:
                continue
            for replica in (later, earlier):
                if self._has_substitute(link.edge, replica, unusable):
                    unusable[replica] = link.error.message if link.error is not None else ""
                    break
        return unusable

    def _find_unknown(self, replica: Replica) -> str:
        """Returns why it is unknown whether a replica can use its fixed connectors, or an empty string if it is known.

        Also returns an empty string if the replica has no substitute.
        """
        for edge in self._edges:
            if edge.connector == AUTO or replica.stage not in (edge.producer, edge.consumer):
                continue
            links = [link for link in self._by_replica[replica] if link.edge is edge]
            probed = all(link.is_answered for link in links) and (links or edge.connector != SHM)
            if probed or not self._has_substitute(edge, replica, ()):
                continue
            other = edge.consumer if replica.stage == edge.producer else edge.producer
            if links:
                return "the connectors of its edges are being probed"
            return f"edge {edge.name} uses shm, and no replica of stage {other!r} is ready on its host"
        return ""

    def _has_substitute(self, edge: Edge, replica: Replica, unusable: Collection[Replica]) -> bool:
        """Returns whether another replica of the same stage and generation has a usable link of the edge.

        Links of the replicas in `unusable` do not count.
        """
        for link in self._usable[edge.name]:
            other = link.producer if replica.stage == edge.producer else link.consumer
            usable = link.producer not in unusable and link.consumer not in unusable
            if other is not replica and other.generation == replica.generation and usable:
                return True
        return False


def _pool_keys(replica: Replica) -> tuple[tuple[str, ...], ...]:
    return (replica.stage, replica.generation), (replica.stage, replica.generation, replica.host)


def _set_member(links: set[EdgeLink], link: EdgeLink, *, member: bool) -> None:
    (links.add if member else links.discard)(link)
