"""Which of the replicas that could take a request does: the one with the least work left, and of equals the nearest.

Looking at all replicas would take the longer the more there are, and would send everything that arrives between two
reports to the same one. Two drawn at random are enough to keep all about equally busy (M. Mitzenmacher, "The Power of
Two Choices in Randomized Load Balancing", 2001); a third makes the slowest requests of busy stages a seventh faster
(`benchmarks/simulate.py`). As many are drawn from each neighbour's host and zone.
"""

import random
from collections.abc import Collection, Sequence
from typing import Protocol

from stagemesh.orchestrator.fleet.random_pool import RandomPool
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_registry import ReadyReplicas

_DRAWN = 3

# How much more work a nearer replica may have: about what crossing costs, far less than a step.
_OTHER_HOST_S = 0.005
_OTHER_ZONE_S = 0.02


class Choice(Protocol):
    """A way to choose."""

    def choose(
        self, ready: ReadyReplicas, *, near: Sequence[Replica] = (), avoid: Collection[Replica] = ()
    ) -> Replica | None:
        """One of the replicas that are ready, for a request whose neighbouring stages run `near`; None where all are
        to be avoided.
        """
        ...


class LeastWork:
    """The one with the least work of a few drawn at random; near ones go before those as busy further away."""

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()  # noqa: S311

    def choose(
        self, ready: ReadyReplicas, *, near: Sequence[Replica] = (), avoid: Collection[Replica] = ()
    ) -> Replica | None:
        """See Choice."""
        drawn = self._draw(ready.all, avoid)
        for neighbour in near:
            drawn += self._draw(ready.on_host(neighbour.host), avoid)
            drawn += self._draw(ready.in_zone(neighbour.zone), avoid)
        return min(drawn, key=lambda replica: replica.load.backlog_s + _distance_s(replica, near), default=None)

    def _draw(self, pool: RandomPool[Replica], avoid: Collection[Replica]) -> list[Replica]:
        drawn = pool.draw(_DRAWN + len(avoid), self._rng)
        self._rng.shuffle(drawn)
        return [replica for replica in drawn if replica not in avoid][:_DRAWN]


def _distance_s(replica: Replica, near: Sequence[Replica]) -> float:
    return sum(_crossing_s(replica, neighbour) for neighbour in near)


def _crossing_s(one: Replica, other: Replica) -> float:
    if one.host and one.host == other.host:
        return 0.0
    return _OTHER_HOST_S if one.zone and one.zone == other.zone else _OTHER_ZONE_S
