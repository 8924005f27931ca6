"""Indexes all replicas by stage, and the ready replicas by generation, host and zone."""

import random
from collections.abc import Collection, Iterator, Mapping
from typing import Generic, TypeVar

from stagemesh.orchestrator.fleet.replica import Replica, ReplicaState

T = TypeVar("T")


class RandomPool(Generic[T]):
    """A set of items from which random items can be selected in constant time. Items must be hashable."""

    __slots__ = ("_indexes", "_items")

    def __init__(self) -> None:
        self._items: list[T] = []
        self._indexes: dict[T, int] = {}

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._indexes

    def add(self, item: T) -> None:
        if item not in self._indexes:
            self._indexes[item] = len(self._items)
            self._items.append(item)

    def discard(self, item: T) -> None:
        index = self._indexes.pop(item, None)
        if index is None:
            return
        last = self._items.pop()
        if index < len(self._items):
            self._items[index] = last
            self._indexes[last] = index

    def draw(self, count: int, rng: random.Random) -> list[T]:
        """Returns `count` different random items, or all items if there are fewer than `count`."""
        if len(self._items) <= count:
            return list(self._items)
        return [self._items[index] for index in rng.sample(range(len(self._items)), count)]


_EMPTY: RandomPool[Replica] = RandomPool()


class ReadyReplicas:
    """The ready replicas of one stage and generation, also indexed by host and by zone."""

    def __init__(self) -> None:
        self.all: RandomPool[Replica] = RandomPool()
        self._by_host: dict[str, RandomPool[Replica]] = {}
        self._by_zone: dict[str, RandomPool[Replica]] = {}

    def on_host(self, host: str) -> RandomPool[Replica]:
        """Returns the ready replicas on a host. Returns an empty pool if `host` is an empty string."""
        return self._by_host.get(host, _EMPTY)

    def in_zone(self, zone: str) -> RandomPool[Replica]:
        """Returns the ready replicas in a zone. Returns an empty pool if `zone` is an empty string."""
        return self._by_zone.get(zone, _EMPTY)

    def add(self, replica: Replica) -> None:
        self.all.add(replica)
        for pools, location in self._locations(replica):
            pools.setdefault(location, RandomPool()).add(replica)

    def discard(self, replica: Replica) -> None:
        self.all.discard(replica)
        for pools, location in self._locations(replica):
            pool = pools.get(location, _EMPTY)
            pool.discard(replica)
            if not pool:
                pools.pop(location, None)

    def _locations(self, replica: Replica) -> list[tuple[dict[str, RandomPool[Replica]], str]]:
        locations = ((self._by_host, replica.host), (self._by_zone, replica.zone))
        return [(pools, location) for pools, location in locations if location]


class ReplicaRegistry:
    """Indexes the replicas that an orchestrator knows.

    The time for an update does not depend on the number of replicas.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, dict[Replica, None]] = {}
        self._ready: dict[str, dict[str, ReadyReplicas]] = {}
        self._entered: dict[Replica, ReadyReplicas] = {}

    def __contains__(self, replica: Replica) -> bool:
        return replica in self._replicas.get(replica.stage, {})

    def add(self, replica: Replica) -> None:
        """Adds a replica under its stage. If the replica is ready, also adds it to the index of ready replicas."""
        self._replicas.setdefault(replica.stage, {})[replica] = None
        self.update(replica)

    def remove(self, replica: Replica) -> None:
        """Removes a replica. Does nothing if the replica is unknown."""
        self._replicas.get(replica.stage, {}).pop(replica, None)
        self._withdraw(replica)

    def update(self, replica: Replica) -> None:
        """Adds a replica to the index of ready replicas, or removes it, according to its state.

        Must be called after each possible change of the state.
        """
        is_ready = replica.state is ReplicaState.READY and replica in self
        if is_ready and replica not in self._entered:
            ready = self._ready.setdefault(replica.generation, {}).setdefault(replica.stage, ReadyReplicas())
            ready.add(replica)
            self._entered[replica] = ready
        elif not is_ready:
            self._withdraw(replica)

    def of(self, stage: str) -> tuple[Replica, ...]:
        """Returns all replicas of a stage, in the order in which they were added."""
        return tuple(self._replicas.get(stage, ()))

    def ready(self, stages: Collection[str]) -> Mapping[str, Mapping[str, ReadyReplicas]]:
        """Returns the ready replicas in a dict from generation to a dict from stage to replicas.

        Includes only generations that have a ready replica of each stage in `stages`.
        """
        return {
            generation: by_stage
            for generation, by_stage in self._ready.items()
            if all(stage in by_stage for stage in stages)
        }

    def has_ready(self, stage: str) -> bool:
        """Returns whether the stage has a ready replica of any generation."""
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
