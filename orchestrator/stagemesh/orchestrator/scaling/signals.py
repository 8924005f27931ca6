"""The signals by which the number of a stage's replicas is chosen. Nothing is computed until a caller asks."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from stagemesh.orchestrator.describe import reported_load
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.timeline import RequestState
from stagemesh.orchestrator.spec.conditions import Fact

_PLAYOUT_MARGIN_S = 0.5
"""A stream whose client has less audio left than this is about to run dry.

A stream that began less than this time ago is not counted, because it starts with its first chunk alone.
"""


class Metric(Enum):
    """The metrics of a stage on which autoscalers act. Each value is the name of the metric."""

    QUEUED = "stagemesh_stage_queued_seconds"
    PLAYOUT = "stagemesh_stage_playout_at_risk"
    IN_FLIGHT = "stagemesh_stage_in_flight"


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
    in_flight: int = 0
    """The number of steps that run or wait at the replicas, for all orchestrators."""
    own_in_flight: int = 0
    """The number of steps that this orchestrator has placed on the replicas."""

    @property
    def queued_s(self) -> float:
        """The work that waits, in seconds: in the queues of the replicas, and in this orchestrator."""
        return self.queued_at_replicas_s + self.unplanned_s

    @property
    def is_active(self) -> bool:
        """Whether the stage has any work."""
        return bool(self.in_flight or self.own_in_flight or self.unplanned_s)

    def own(self, metric: Metric) -> float:
        """Returns this orchestrator's part of a metric. The sum over all orchestrators is the metric of the stage."""
        match metric:
            case Metric.QUEUED:
                return self.own_queued_at_replicas_s + self.unplanned_s
            case Metric.PLAYOUT:
                return self.playout_at_risk
            case Metric.IN_FLIGHT:
                return self.own_in_flight

    def total(self, metric: Metric, *, orchestrators: int) -> float:
        """Returns a metric of the stage, if each of `orchestrators` orchestrators has as many requests as this one."""
        match metric:
            case Metric.QUEUED:
                return self.queued_at_replicas_s + orchestrators * self.unplanned_s
            case Metric.PLAYOUT:
                return orchestrators * self.playout_at_risk
            case Metric.IN_FLIGHT:
                return self.in_flight


class ScalingSignals:
    """Computes the signals of the stages from the requests and the replicas of an orchestrator."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    def by_stage(self) -> Mapping[str, StageSignals]:
        """Returns the current signals of every stage of the pipeline."""
        fleet = self._orchestrator.fleet
        unplanned, at_risk = self.unplanned(), self._at_risk()
        signals: dict[str, StageSignals] = {}
        for stage, replicas in fleet.replicas.items():
            loads = [(replica, load) for replica in replicas if (load := reported_load(replica)) is not None]
            signals[stage] = StageSignals(
                queued_at_replicas_s=sum(replica.load.queued_s for replica, _ in loads),
                own_queued_at_replicas_s=sum(
                    replica.load.queued_s * _own_part(replica, load.running + load.queued) for replica, load in loads
                ),
                unplanned_s=unplanned[stage] * fleet.step_cost(stage).seconds,
                playout_at_risk=at_risk[stage],
                in_flight=sum(load.running + load.queued for _, load in loads),
                own_in_flight=sum(replica.running for replica in replicas),
            )
        return signals

    def unplanned(self) -> Counter[str]:
        """Returns the number of steps of each stage in requests that are not planned yet, by stage name.

        These requests wait for admission, or for a ready replica of one of their stages.
        """
        pipeline = self._orchestrator.pipeline
        # Requests are counted by what their route depends on, because to compute a route takes longer than to count.
        kinds = Counter[tuple[tuple[str, ...], frozenset[tuple[Fact, float]]]]()
        for known in self._orchestrator.requests.running:
            timeline = known.record.timeline
            if timeline.state is RequestState.QUEUED:
                kinds[timeline.outputs, frozenset(known.facts.items())] += timeline.choices
        steps = Counter[str]()
        for (outputs, facts), count in kinds.items():
            for stage in pipeline.route(outputs, dict(facts)).stages:
                steps[stage.name] += count
        return steps

    def _at_risk(self) -> Counter[str]:
        """Returns the number of audio streams that are about to run dry, by the name of the stage that emits them."""
        outputs, streams = self._orchestrator.pipeline.all_outputs, Counter[str]()
        for known in self._orchestrator.requests.running:
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


def _own_part(replica: Replica, steps: int) -> float:
    """Returns the part of a replica's steps that this orchestrator has placed there, from 0 to 1."""
    return min(1.0, replica.running / steps) if steps else 0.0
