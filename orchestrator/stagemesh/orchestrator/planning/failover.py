"""Finds replacement replicas for the stages of running requests."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack
from typing import NamedTuple

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import UnavailableError
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.planning.planner import Plan, Planner
from stagemesh.orchestrator.planning.state_budget import StateBudget

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5


class Placement(NamedTuple):
    """A replica that was chosen for a stage, and a function that ends the replica's reservation.

    The function is idempotent.
    """

    replica: Replica
    release: Callable[[], None]


class Failover:
    """Finds replacement replicas for the lost stages of all requests of one orchestrator.

    Reserves at most one replica of each stage at a time for a single request.
    """

    def __init__(self, planner: Planner, *, max_kept_state_bytes: int = 256 << 20) -> None:
        self.kept_states = StateBudget(max_kept_state_bytes)
        """The budget for the checkpoints from which steps resume if their replicas terminate."""
        self._planner = planner
        self._reserving: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def find(self, stage: str, plan: Callable[[], Plan], *, avoid: Collection[Replica]) -> Placement:
        """Waits until a replica of the stage is ready, and returns it.

        Chooses a replica in `avoid` only if no other replica is ready.
        """
        backoff = Backoff(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        while True:
            for avoided in (avoid, ()):
                try:
                    return Placement(self._planner.choose_again(stage, plan(), avoid=avoided), lambda: None)
                except UnavailableError:
                    continue
            await asyncio.sleep(backoff.next_s())

    async def find_alone(self, stage: str, plan: Callable[[], Plan], *, avoid: Collection[Replica]) -> Placement:
        """Reserves a replica for one request, and waits until it runs no other request of this orchestrator.

        The reservation ends when the returned placement is released.
        """
        with ExitStack() as reservation:
            await self._reserving[stage].acquire()
            reservation.callback(self._reserving[stage].release)
            while True:
                replica = (await self.find(stage, plan, avoid=avoid)).replica
                with ExitStack() as hold:
                    hold.callback(replica.reserve("it runs one request alone, which may have terminated processes"))
                    await replica.wait_until_idle()
                    if replica.end_cause is None:
                        reservation.push(hold.pop_all())
                        return Placement(replica, reservation.pop_all().close)
