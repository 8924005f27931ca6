"""Finds another replica for a stage of a request that runs: at once, or as soon as there is one."""

import asyncio
from collections import defaultdict
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import UnavailableError
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.planning.planner import Plan
from stagemesh.orchestrator.request.state_budget import StateBudget

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.5


class Chooser(Protocol):
    """Whoever chooses replicas: the planner."""

    def choose_again(self, stage: str, plan: Plan, *, avoid: Collection[Replica]) -> Replica:
        """See Planner."""
        ...


class Placement(NamedTuple):
    """A replica, and what ends the arrangement with it."""

    replica: Replica
    leave: Callable[[], None]


class Failover:
    """An orchestrator's. At most one replica a stage is reserved at a time."""

    def __init__(self, chooser: Chooser, *, max_kept_state_bytes: int = 256 << 20) -> None:
        self.kept_states = StateBudget(max_kept_state_bytes)
        """The checkpoint states that lost steps can resume from."""
        self._chooser = chooser
        self._reserving: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def find(self, stage: str, plan: Callable[[], Plan], *, avoid: Collection[Replica]) -> Placement:
        """A replica that takes requests, another one than those to avoid where there is one. Waits without an end."""
        backoff = Backoff(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        while True:
            replica = self._choose(stage, plan(), avoid)
            if replica is not None:
                return Placement(replica, lambda: None)
            await asyncio.sleep(backoff.next_s())

    async def find_alone(self, stage: str, plan: Callable[[], Plan], *, avoid: Collection[Replica]) -> Placement:
        """A replica on which no other request of this orchestrator is, nor will be until the caller leaves it."""
        reserving = self._reserving[stage]
        await reserving.acquire()
        try:
            while True:
                replica = (await self.find(stage, plan, avoid=avoid)).replica
                free = replica.reserve("it runs one request alone, which may have ended others")
                try:
                    await replica.wait_unused()
                except BaseException:
                    free()
                    raise
                if replica.gone is None:
                    return Placement(replica, _once(free, reserving.release))
                free()
        except BaseException:
            reserving.release()
            raise

    def _choose(self, stage: str, plan: Plan, avoid: Collection[Replica]) -> Replica | None:
        for avoided in (avoid, ()):
            try:
                return self._chooser.choose_again(stage, plan, avoid=avoided)
            except UnavailableError:
                continue
        return None


def _once(*calls: Callable[[], None]) -> Callable[[], None]:
    left = list(calls)

    def leave() -> None:
        while left:
            left.pop()()

    return leave
