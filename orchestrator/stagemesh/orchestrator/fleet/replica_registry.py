"""An index of all replicas by stage, and of the ready replicas by generation, stage, host and zone."""

import random
from collections.abc import Collection, Iterator, Mapping
from typing import Generic, TypeVar

from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.common.requests.adapter_selection import parse_adapters
from stagemesh.orchestrator.fleet.replica import Replica

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


class RandomPools(dict[tuple[str, ...], RandomPool[T]]):
    """Random pools by key. A pool without items is not stored. A missing key therefore has an empty pool."""

    def __missing__(self, key: tuple[str, ...]) -> RandomPool[T]:
        return RandomPool()

    def add(self, key: tuple[str, ...], item: T) -> None:
        self.setdefault(key, RandomPool()).add(item)

    def discard(self, key: tuple[str, ...], item: T) -> None:
        self[key].discard(item)
        if not self[key]:
            self.pop(key, None)


class ReadyReplicas:
    """The ready replicas of one stage and generation, also indexed by host, by zone and by adapter."""

    def __init__(self) -> None:
        self.all: RandomPool[Replica] = RandomPool()
        self._by_location: RandomPools[Replica] = RandomPools()
        self._by_adapter: dict[str, ReadyReplicas] = {}
        self._adapters: dict[Replica, frozenset[str]] = {}
        """The adapters by which each replica is indexed."""

    def with_adapters(self, selection: str | None) -> "ReadyReplicas":
        """Returns the ready replicas that have loaded the selected adapters. Returns all ready replicas if `selection`
        is None.

        `selection` is a name, or has the form that `parse_adapters` reads. Raises InvalidRequestError if it is neither.
        """
        if selection is None or selection in self._by_adapter:
            return self if selection is None else self._by_adapter[selection]
        names = {each.name for each in parse_adapters(selection)}
        able = ReadyReplicas()
        for replica, loaded in self._adapters.items():
            if names <= loaded:
                able.add(replica)
        return able

    def only_on_host(self, host: str) -> "ReadyReplicas":
        """Returns the ready replicas on a host. Returns all ready replicas if `host` is an empty string."""
        if not host:
            return self
        there = ReadyReplicas()
        for replica in self.on_host(host):
            there.add(replica)
        return there

    def on_host(self, host: str) -> RandomPool[Replica]:
        """Returns the ready replicas on a host. Returns an empty pool if `host` is an empty string."""
        return self._by_location["host", host]

    def in_zone(self, zone: str) -> RandomPool[Replica]:
        """Returns the ready replicas in a zone. Returns an empty pool if `zone` is an empty string."""
        return self._by_location["zone", zone]

    def add(self, replica: Replica, *, adapters: frozenset[str] = frozenset()) -> None:
        """Adds a replica and indexes it by `adapters`, which replace those of an earlier call."""
        self.all.add(replica)
        for location in _locations(replica):
            self._by_location.add(location, replica)
        self._index_adapters(replica, adapters)

    def discard(self, replica: Replica) -> None:
        self.all.discard(replica)
        for location in _locations(replica):
            self._by_location.discard(location, replica)
        self._index_adapters(replica, frozenset())

    def _index_adapters(self, replica: Replica, adapters: frozenset[str]) -> None:
        former = self._adapters.pop(replica, frozenset())
        if adapters:
            self._adapters[replica] = adapters
        for name in adapters - former:
            self._by_adapter.setdefault(name, ReadyReplicas()).add(replica)
        for name in former - adapters:
            having = self._by_adapter[name]
            having.discard(replica)
            if not having.all:
                del self._by_adapter[name]


def _locations(replica: Replica) -> list[tuple[str, str]]:
    return [(kind, name) for kind, name in (("host", replica.host), ("zone", replica.zone)) if name]


class ReplicaRegistry:
    """An index of all replicas that an orchestrator has found.

    The time for an update does not depend on the number of replicas.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, dict[Replica, None]] = {}
        self._ready: dict[str, dict[str, ReadyReplicas]] = {}

    def __contains__(self, replica: Replica) -> bool:
        return replica in self._replicas.get(replica.stage, {})

    def add(self, replica: Replica) -> None:
        """Adds a replica to its stage. If the replica is ready, also adds it to the index of ready replicas."""
        self._replicas.setdefault(replica.stage, {})[replica] = None
        self.update(replica)

    def remove(self, replica: Replica) -> None:
        """Removes a replica. Does nothing if the registry does not contain the replica."""
        self._replicas.get(replica.stage, {}).pop(replica, None)
        self._withdraw(replica)

    def update(self, replica: Replica) -> None:
        """Adds a replica to the index of ready replicas if it is ready. Otherwise removes it from this index.

        Must be called whenever the state of the replica may have changed.
        """
        if replica.state is ReplicaState.READY and replica in self:
            by_stage = self._ready.setdefault(replica.generation, {})
            ready = by_stage.setdefault(replica.stage, ReadyReplicas())
            ready.add(replica, adapters=replica.adapters or frozenset())
        else:
            self._withdraw(replica)

    def of(self, stage: str) -> tuple[Replica, ...]:
        """Returns all replicas of a stage, in the order in which they were added."""
        return tuple(self._replicas.get(stage, ()))

    def ready(self, stages: Collection[str]) -> Mapping[str, Mapping[str, ReadyReplicas]]:
        """Returns the ready replicas, grouped by generation and then by stage name.

        Includes only generations that have a ready replica of each stage in `stages`.
        """
        return {
            generation: by_stage
            for generation, by_stage in self._ready.items()
            if all(stage in by_stage for stage in stages)
        }

    def has_ready(self, stage: str) -> bool:
        """Returns whether the stage has a ready replica in at least one generation."""
        return any(stage in by_stage for by_stage in self._ready.values())

    def _withdraw(self, replica: Replica) -> None:
        by_stage = self._ready.get(replica.generation, {})
        ready = by_stage.get(replica.stage)
        if ready is None:
            return
        ready.discard(replica)
        if not ready.all:
            del by_stage[replica.stage]
        if not by_stage:
            del self._ready[replica.generation]
