"""The signals by which the number of a stage's replicas is chosen, and the warm tier that acts on them.

No signal is computed until a caller asks. The warm tier wakes sleeping replicas when requests need them.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from stagemesh.common.errors import StagemeshError
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.orchestrator.fleet.replica import Replica, reported_load
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.timeline import RequestState, Timeline
from stagemesh.pipeline.conditions import Fact
from stagemesh.v1 import control_pb2, stage_pb2

_PLAYOUT_MARGIN_S = 0.5
"""A stream whose client has less audio left than this is about to run dry.

A stream that began less than this time ago is not counted, because it starts with its first chunk alone.
"""
_log = logging.getLogger(__name__)
_INTERVAL_S = 0.2
_WAKE_S = 60.0
_DESCRIBE_S = 5.0
_RETRY_S = 10.0
"""The time after which a replica that failed to wake is woken again, in seconds."""


@dataclass(frozen=True, kw_only=True)
class StageSignals:
    """The signals of one stage.

    Replicas report their queues for all orchestrators. The other signals are known only to the orchestrator itself.
    """

    queued_at_replicas_s: float = 0.0
    """The work that waits in the queues of the replicas, in seconds."""
    own_queued_at_replicas_s: float = 0.0
    """This orchestrator's part of `queued_at_replicas_s`."""
    unplanned_s: float = 0.0
    """The work of requests that this orchestrator has not planned yet, in seconds."""
    playout_at_risk: int = 0
    """The number of audio streams that are about to run dry."""
    own_in_flight: int = 0
    """The number of steps that this orchestrator has placed on the replicas."""

    @property
    def queued_s(self) -> float:
        """The work that waits, in seconds: in the queues of the replicas, and in this orchestrator."""
        return self.queued_at_replicas_s + self.unplanned_s

    @property
    def own_queued_s(self) -> float:
        """This orchestrator's part of `queued_s`. The sum over all orchestrators is the work that waits."""
        return self.own_queued_at_replicas_s + self.unplanned_s


def signals_by_stage(orchestrator: Orchestrator) -> Mapping[str, StageSignals]:
    """Returns the current signals of every stage of the pipeline."""
    fleet = orchestrator.fleet
    unplanned, at_risk = unplanned_steps(orchestrator), _at_risk(orchestrator)
    signals: dict[str, StageSignals] = {}
    for stage, replicas in fleet.replicas.items():
        loads = [(replica, load) for replica in replicas if (load := reported_load(replica)) is not None]
        signals[stage] = StageSignals(
            queued_at_replicas_s=sum(replica.load.queued_s for replica, _ in loads),
            own_queued_at_replicas_s=sum(_own_queued_s(replica, load) for replica, load in loads),
            unplanned_s=unplanned[stage] * fleet.step_costs[stage].seconds,
            playout_at_risk=at_risk[stage],
            own_in_flight=sum(replica.running for replica in replicas),
        )
    return signals


def unplanned_steps(orchestrator: Orchestrator) -> Counter[str]:
    """Returns the number of steps of each stage in requests that are not planned yet, by stage name.

    These requests wait for admission, or for a ready replica of one of their stages.
    """
    pipeline = orchestrator.pipeline
    # Requests are counted by what their route depends on, because to compute a route takes longer than to count.
    kinds = Counter[tuple[tuple[str, ...], frozenset[tuple[Fact, float]]]]()
    for known in orchestrator.requests.running:
        timeline = known.record.timeline
        if timeline.state is RequestState.QUEUED:
            kinds[timeline.outputs, frozenset(known.facts.items())] += timeline.choices
    steps = Counter[str]()
    for (outputs, facts), count in kinds.items():
        for stage in pipeline.route(outputs, dict(facts)).stages:
            steps[stage.name] += count
    return steps


def _at_risk(orchestrator: Orchestrator) -> Counter[str]:
    """Returns the number of audio streams that are about to run dry, by the name of the stage that emits them."""
    outputs, streams = orchestrator.pipeline.all_outputs, Counter[str]()
    for known in orchestrator.requests.running:
        record = known.record
        now_s = record.timeline.elapsed_s()
        for key, began_s in record.first_outputs_s.items():
            output, played_s = outputs[key[0]], now_s - began_s
            is_played = output.kind == "audio" and not output.file_type and key not in record.position.finished
            if not is_played or played_s < _PLAYOUT_MARGIN_S:
                continue
            left_s = record.position.counts[key] / output.sample_rate_hz - played_s
            streams[output.stage] += left_s < _PLAYOUT_MARGIN_S
    return streams


def _own_queued_s(replica: Replica, load: stage_pb2.WatchLoadResponse) -> float:
    """Returns this orchestrator's part of the work that waits at a replica, in seconds.

    It is the same part as of the replica's steps.
    """
    steps = load.running + load.queued
    return replica.load.queued_s * min(1.0, replica.running / steps) if steps else 0.0


class WarmTier:
    """Wakes at most one replica of a stage at a time, and only while every ready replica of the stage has work.

    Each of several orchestrators chooses the same replica, so that together they do not wake more than they need. A
    replica falls asleep again by itself.
    """

    def __init__(self, orchestrator: Orchestrator, wake_above_s: Mapping[str, float]) -> None:
        """`wake_above_s` is the waiting work of each warm stage above which a replica is woken, in seconds."""
        self._orchestrator, self._wake_above_s = orchestrator, wake_above_s
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
        replicas = self._orchestrator.fleet.registry.of(stage)
        # A replica that can connect accepts steps, now or as soon as its connectors are probed.
        ready = [each for each in replicas if each.can_connect and each.state is not ReplicaState.FAILED]
        if not ready:
            running = self._orchestrator.requests.running
            return bool(unplanned_steps(self._orchestrator)[stage]) or any(
                _has_unfinished_step(known.record.timeline, stage) for known in running
            )
        if not all(map(_has_work, ready)):
            return False
        return signals_by_stage(self._orchestrator)[stage].queued_s > self._wake_above_s[stage]

    async def _wake(self, replica: Replica) -> None:
        """Wakes a replica. Returns when the replica accepts steps."""
        _log.info("waking replica %s of stage %s", replica.name, replica.stage)
        try:
            await replica.client.control(control_pb2.WakeRequest(), control_pb2.WakeResponse, timeout_s=_WAKE_S)
            await replica.observe_again(ReplicaState.ASLEEP, timeout_s=_DESCRIBE_S)
        except StagemeshError as exc:
            _log.warning("replica %s of stage %s cannot be woken: %s", replica.name, replica.stage, exc.message)
            self._failed_at_s[replica] = asyncio.get_running_loop().time()


def _has_work(replica: Replica) -> bool:
    load = replica.last_report
    return bool(replica.running or (load is not None and load.running + load.queued))


def _has_unfinished_step(timeline: Timeline, stage: str) -> bool:
    """Returns whether a request has started a stage that has not finished, for at least one of its choices."""
    latest = {step.index: step for step in timeline.steps if step.stage == stage}
    return any(step.finished is None for step in latest.values())
