"""Finds replacement replicas for the stages of running requests, and limits the size of their checkpoints."""

import asyncio
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Collection
from contextlib import ExitStack, suppress
from typing import NamedTuple

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import UnavailableError
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.planning.planner import Plan, Planner

_PAUSES = Backoff(first_s=0.05, longest_s=0.5)


class Failover:
    """Finds replacement replicas for the lost stages of all requests of one orchestrator.

    In each stage, reserves at most one replica at a time for a single request.
    """

    def __init__(self, planner: Planner, *, max_kept_state_bytes: int = 256 << 20) -> None:
        self.kept_states = StateBudget(max_kept_state_bytes)
        """The budget that limits the total size of the retained checkpoints."""
        self._planner = planner
        self._reserving: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def find(self, stage: str, plan: Plan, *, avoid: Collection[Replica]) -> Replica | None:
        """Waits until a replica of the stage and of the plan's generation is ready, and returns the replica.

        Chooses a replica in `avoid` only if no other replica is ready. Returns None if an upgrade has replaced the
        plan's generation.
        """
        retries = _PAUSES.retries()
        while True:
            for avoided in (avoid, ()):
                with suppress(UnavailableError):
                    return self._planner.choose_again(stage, plan, avoid=avoided)
            if self._planner.has_ended(stage, plan):
                return None
            await retries.sleep()

    async def find_alone(
        self, stage: str, plan: Plan, *, avoid: Collection[Replica], reservation: ExitStack
    ) -> Replica | None:
        """Reserves a replica for one request. Waits until the replica runs no other request of this orchestrator.

        Returns the replica. Chooses a replica in `avoid` only if no other replica is ready. Closing `reservation` ends
        the reservation. Returns None if an upgrade has replaced the plan's generation.
        """
        with ExitStack() as reserved:
            await self._reserving[stage].acquire()
            reserved.callback(self._reserving[stage].release)
            while True:
                replica = await self.find(stage, plan, avoid=avoid)
                if replica is None:
                    return None
                with ExitStack() as hold:
                    hold.callback(replica.reserve("it runs one request alone, which may have terminated processes"))
                    await replica.wait_until_idle()
                    if replica.end_cause is None:
                        reserved.push(hold.pop_all())
                        reservation.push(reserved.pop_all())
                        return replica


class _KeptState(NamedTuple):
    size_bytes: int
    drop: Callable[[], None]


class StateBudget:
    """Limits the total size of the checkpoints that the orchestrator retains.

    If a replica terminates, the steps that ran on the replica resume from these checkpoints. The oldest checkpoints are
    dropped first. A step whose checkpoint was dropped restarts from the beginning. A checkpoint that was sent to a
    restarted step is not counted, because that checkpoint is part of the step's request.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.size_bytes = 0
        """The total size of the retained checkpoints, in bytes."""
        self._limit_bytes = limit_bytes
        # By `id`, because owners need not be hashable. An owner stays alive at least until its state is released.
        self._states: OrderedDict[int, _KeptState] = OrderedDict()

    def keep(self, owner: object, size_bytes: int, *, drop: Callable[[], None]) -> bool:
        """Replaces the owner's checkpoint. Returns False if the new checkpoint alone exceeds the limit.

        If False is returned, the owner must not retain the new checkpoint. `drop` is called if newer checkpoints of
        other owners displace this checkpoint later.
        """
        self.release(owner)
        if size_bytes > self._limit_bytes:
            return False
        self._states[id(owner)] = _KeptState(size_bytes, drop)
        self.size_bytes += size_bytes
        while self.size_bytes > self._limit_bytes:
            _, oldest = self._states.popitem(last=False)
            self.size_bytes -= oldest.size_bytes
            oldest.drop()
        return True

    def release(self, owner: object) -> None:
        """Subtracts the size of the owner's checkpoint from the total. Does nothing if the owner has no checkpoint."""
        state = self._states.pop(id(owner), None)
        if state is not None:
            self.size_bytes -= state.size_bytes
