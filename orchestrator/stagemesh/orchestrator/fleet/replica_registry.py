"""All replicas by stage, and those that take requests so that a plan finds them at once."""

from collections.abc import Collection, Mapping

from stagemesh.orchestrator.fleet.random_pool import RandomPool
from stagemesh.orchestrator.fleet.replica import Replica, ReplicaState

_NOBODY: RandomPool[Replica] = RandomPool()


class ReadyReplicas:
    """The replicas of one stage and generation that take requests: all, and those of each host and zone."""

    def __init__(self) -> None:
        self.all: RandomPool[Replica] = RandomPool()
        self._by_host: dict[str, RandomPool[Replica]] = {}
        self._by_zone: dict[str, RandomPool[Replica]] = {}

    def on_host(self, host: str) -> RandomPool[Replica]:
        """Those of a host; none where it is not known."""
        return self._by_host.get(host, _NOBODY)

    def in_zone(self, zone: str) -> RandomPool[Replica]:
        """Those of a zone; none where it is not known."""
        return self._by_zone.get(zone, _NOBODY)

    def add(self, replica: Replica) -> None:
        """It takes requests."""
        self.all.add(replica)
        for pools, place in self._places(replica):
            pools.setdefault(place, RandomPool()).add(replica)

    def discard(self, replica: Replica) -> None:
        """It takes none."""
        self.all.discard(replica)
        for pools, place in self._places(replica):
            pool = pools.get(place, _NOBODY)
            pool.discard(replica)
            if not pool:
                pools.pop(place, None)

    def _places(self, replica: Replica) -> list[tuple[dict[str, RandomPool[Replica]], str]]:
        places = ((self._by_host, replica.host), (self._by_zone, replica.zone))
        return [(pools, place) for pools, place in places if place]


class ReplicaRegistry:
    """The replicas that an orchestrator knows. Every change takes the same time however many there are."""

    def __init__(self) -> None:
        self._replicas: dict[str, dict[Replica, None]] = {}
        self._ready: dict[str, dict[str, ReadyReplicas]] = {}
        self._entered: dict[Replica, ReadyReplicas] = {}

    def add(self, replica: Replica) -> None:
        """A replica is known."""
        self._replicas.setdefault(replica.stage, {})[replica] = None
        self.update(replica)

    def remove(self, replica: Replica) -> None:
        """A replica is forgotten; harmless where it was not known."""
        self._replicas.get(replica.stage, {}).pop(replica, None)
        self._withdraw(replica)

    def update(self, replica: Replica) -> bool:
        """The replica's state may be another one; returns whether it begins or ceases to take requests."""
        was_ready = replica in self._entered
        is_ready = replica.state is ReplicaState.READY and replica in self._replicas.get(replica.stage, {})
        if is_ready and not was_ready:
            ready = self._ready.setdefault(replica.generation, {}).setdefault(replica.stage, ReadyReplicas())
            ready.add(replica)
            self._entered[replica] = ready
        elif was_ready and not is_ready:
            self._withdraw(replica)
        return is_ready is not was_ready

    def of(self, stage: str) -> tuple[Replica, ...]:
        """All replicas of a stage, in the order in which they came."""
        return tuple(self._replicas.get(stage, ()))

    def ready(self, stages: Collection[str]) -> Mapping[str, Mapping[str, ReadyReplicas]]:
        """By generation and stage, those that take requests, for generations that can serve all of the stages."""
        return {
            generation: by_stage
            for generation, by_stage in self._ready.items()
            if all(stage in by_stage for stage in stages)
        }

    def is_ready(self, replica: Replica) -> bool:
        """Whether the replica takes requests."""
        return replica in self._entered

    def has_ready(self, stage: str) -> bool:
        """Whether a replica of the stage takes requests."""
        return any(stage in by_stage for by_stage in self._ready.values())

    def _withdraw(self, replica: Replica) -> None:
        ready = self._entered.pop(replica, None)
        if ready is None:
            return
        ready.discard(replica)
        if not ready.all:
            by_stage = self._ready[replica.generation]
            del by_stage[replica.stage]
            if not by_stage:
                del self._ready[replica.generation]
