"""Wakes sleeping replicas when requests need them."""

import asyncio
import logging
from collections.abc import Mapping

from stagemesh.common.errors import StagemeshError
from stagemesh.common.replica_state import ReplicaState
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.orchestrator.scaling.signals import ScalingSignals
from stagemesh.v1 import control_pb2

_log = logging.getLogger(__name__)

_INTERVAL_S = 0.2
_WAKE_S = 60.0
_DESCRIBE_S = 5.0
_RETRY_S = 10.0
"""The time after which a replica that failed to wake is woken again, in seconds."""


class WarmTier:
    """Wakes at most one replica of a stage at a time, and only while every ready replica of the stage has work.

    Each of several orchestrators chooses the same replica, so that together they do not wake more than they need. A
    replica falls asleep again by itself.
    """

    def __init__(self, orchestrator: Orchestrator, wake_above_s: Mapping[str, float]) -> None:
        """`wake_above_s` is the waiting work of each warm stage above which a replica is woken, in seconds."""
        self._orchestrator, self._wake_above_s = orchestrator, wake_above_s
        self._signals = ScalingSignals(orchestrator)
        self._failed_at_s: dict[Replica, float] = {}

    async def wake_replicas(self) -> None:
        """Wakes replicas until the call is cancelled."""
        async with asyncio.TaskGroup() as group:
            for stage in self._wake_above_s:
                group.create_task(self._watch(stage), name=f"warm tier of {stage}")

    async def _watch(self, stage: str) -> None:
        while True:
            await asyncio.sleep(_INTERVAL_S)
            replica = self._next(stage)
            if replica is not None and self._is_needed(stage):
                await self._wake(replica)

    def _next(self, stage: str) -> Replica | None:
        """Returns the replica to wake next, or None if no replica of the stage sleeps."""
        fleet, now_s = self._orchestrator.fleet, asyncio.get_running_loop().time()
        self._failed_at_s = {each: at_s for each, at_s in self._failed_at_s.items() if at_s + _RETRY_S > now_s}
        serving = fleet.serving_generations
        usable = (each for each in fleet.sleeping(stage) if each.generation in serving)
        return next((each for each in usable if each not in self._failed_at_s), None)

    def _is_needed(self, stage: str) -> bool:
        ready = [replica for replica in self._orchestrator.fleet.registry.of(stage) if _is_awake(replica)]
        if not ready:
            running = self._orchestrator.requests.running
            return bool(self._signals.unplanned()[stage]) or any(
                _has_unfinished_step(known.record.timeline, stage) for known in running
            )
        if not all(map(_has_work, ready)):
            return False
        return self._signals.by_stage()[stage].queued_s > self._wake_above_s[stage]

    async def _wake(self, replica: Replica) -> None:
        """Wakes a replica. Returns when the replica accepts steps."""
        _log.info("waking replica %s of stage %s", replica.name, replica.stage)
        try:
            await replica.client.control("Wake", control_pb2.WakeRequest().SerializeToString(), timeout_s=_WAKE_S)
            await replica.observe_again(ReplicaState.ASLEEP, timeout_s=_DESCRIBE_S)
        except StagemeshError as exc:
            _log.warning("replica %s of stage %s cannot be woken: %s", replica.name, replica.stage, exc.message)
            self._failed_at_s[replica] = asyncio.get_running_loop().time()


def _is_awake(replica: Replica) -> bool:
    """Returns whether a replica accepts steps, or does so as soon as its connectors are probed."""
    return replica.can_connect and replica.state is not ReplicaState.FAILED


def _has_work(replica: Replica) -> bool:
    load = replica.last_report
    return bool(replica.running or (load is not None and load.running + load.queued))


def _has_unfinished_step(timeline: Timeline, stage: str) -> bool:
    """Returns whether a request has started a stage that has not finished, for at least one of its choices."""
    latest = {step.index: step for step in timeline.steps if step.stage == stage}
    return any(step.finished is None for step in latest.values())
