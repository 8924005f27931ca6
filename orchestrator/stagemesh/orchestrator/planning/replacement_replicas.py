"""Finds replacement replicas for the stages of running requests."""

import asyncio
from collections import defaultdict
from collections.abc import Collection
from contextlib import ExitStack, suppress

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import UnavailableError
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.planning.checkpoint_budget import CheckpointBudget
from stagemesh.orchestrator.planning.planner import Plan, Planner

_PAUSES = Backoff(first_s=0.05, longest_s=0.5)


class ReplacementReplicas:
    """Finds replacement replicas for the lost stages of all requests of one orchestrator.

    In each stage, reserves at most one replica at a time for a single request.
    """

    def __init__(self, planner: Planner, *, max_kept_state_bytes: int = 256 << 20) -> None:
        self.checkpoints = CheckpointBudget(max_kept_state_bytes)
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
