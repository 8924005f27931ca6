"""The metrics that Prometheus reads: requests, stages, edges and replicas, and the scaling signals.

The names and units follow the conventions of Prometheus. Counters and histograms count what has ended: a request is
added once, at its end. Nothing is done for each output.
"""

import math
from collections import Counter as Counts
from collections.abc import Iterable, Iterator
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stagemesh.common.errors import StagemeshError
from stagemesh.connectors.flow.edge_meters import sent_metrics
from stagemesh.orchestrator.fleet.replica import reported_load
from stagemesh.orchestrator.metrics.scaling import signals_by_stage
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.timeline import RequestState, StepNotes, Timeline
from stagemesh.v1.errors_pb2 import ErrorReason

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
_UNDERRUN_SECONDS = (0.0, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
SCALING_METRICS = {
    "stagemesh_stage_queued_seconds": "Seconds of work that waits for the stage: this orchestrator's part of the "
    "replicas' queues, and its requests that are not planned yet.",
    "stagemesh_stage_playout_at_risk": "Audio streams of this orchestrator that the stage emits and that are about to "
    "run dry.",
    "stagemesh_stage_in_flight": "Steps of this orchestrator that run or wait at the stage's replicas.",
}
"""The metrics of a stage on which autoscalers act, by name. The sum over all orchestrators is the stage's metric."""
_OUTCOMES = (RequestState.FINISHED, RequestState.FAILED, RequestState.CANCELLED)


class OrchestratorMetrics:
    """The metrics of one orchestrator. Call all methods on the orchestrator's event loop."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        """Observes the requests that end from now on."""
        self._orchestrator = orchestrator
        self._observed = CollectorRegistry()
        """The metrics that are updated when a request ends."""
        counter = partial(Counter, registry=self._observed)
        histogram = partial(Histogram, buckets=_SECONDS, registry=self._observed)
        stage = ("stage",)
        self._errors = counter("stagemesh_request_errors", "Failed requests, by the reason of the error.", ("reason",))
        self._queue_s = histogram("stagemesh_request_queue_seconds", "Seconds from a request's receipt to its plan.")
        self._first_output_s = histogram(
            "stagemesh_request_first_output_seconds", "Seconds from a request's receipt to the first output of a stage."
        )
        self._request_s = histogram("stagemesh_request_seconds", "Seconds from a request's receipt to its end.")
        self._step_s = histogram(
            "stagemesh_stage_step_seconds", "Seconds from a step's acceptance by a replica to its end.", stage
        )
        self._step_first_output_s = histogram(
            "stagemesh_stage_first_output_seconds",
            "Seconds from sending a step to a replica to its first output.",
            stage,
        )
        self._recoveries = counter(
            "stagemesh_stage_recoveries",
            "Attempts of a stage that ended without a result and were followed by another, by the reason of the end.",
            ("stage", "reason"),
        )
        self._work = {
            field: counter(name, text, stage)
            for field, name, text in (
                ("prompt_tokens", "stagemesh_stage_prompt_tokens", "Tokens of prompts."),
                ("output_tokens", "stagemesh_stage_output_tokens", "Tokens that the stage has made."),
                ("cached_tokens", "stagemesh_stage_cached_tokens", "Tokens of prompts that were cached."),
                ("audio_s", "stagemesh_stage_audio_seconds", "Seconds of audio that the stage has made."),
                ("images", "stagemesh_stage_images", "Images that the stage has made."),
                ("frames", "stagemesh_stage_frames", "Frames of video that the stage has made."),
            )
        }
        self._underrun_s = counter(
            "stagemesh_stage_audio_underrun_seconds",
            "Seconds for which listeners of streamed audio waited for its next part.",
            stage,
        )
        self._longest_underrun_s = histogram(
            "stagemesh_stage_audio_longest_underrun_seconds",
            "Seconds of the longest underrun of each audio stream that has ended.",
            stage,
            buckets=_UNDERRUN_SECONDS,
        )
        orchestrator.on_ended.append(self._observe)

    def collect(self) -> Iterator[Metric]:
        """Yields the present values of all metrics."""
        yield from self._scaling()
        yield from self._observed.collect()
        yield from self._requests()
        yield from self._stages()
        yield from self._edges()
        yield from self._replicas()
        yield from sent_metrics(self._orchestrator.input_planes.meters)

    def _scaling(self) -> Iterator[Metric]:
        gauges = [GaugeMetricFamily(name, text, labels=("stage",)) for name, text in SCALING_METRICS.items()]
        for stage, signals in signals_by_stage(self._orchestrator).items():
            values = (signals.own_queued_s, signals.playout_at_risk, signals.own_in_flight)
            for gauge, value in zip(gauges, values, strict=True):
                gauge.add_metric((stage,), value)
        yield from gauges

    def _observe(self, timeline: Timeline) -> None:
        """Adds a request that has ended."""
        if timeline.error is not None and timeline.state is RequestState.FAILED:
            self._errors.labels(_known_reason(timeline.error)).inc()
        if timeline.planned_s is not None:
            self._queue_s.observe(timeline.planned_s)
        outputs_s = [notes.first_output_s for notes in timeline.steps if notes.first_output_s is not None]
        if outputs_s:
            self._first_output_s.observe(min(outputs_s))
        self._request_s.observe(timeline.age_s)
        for (name, _), playout in timeline.playouts.items():
            stage = self._orchestrator.pipeline.all_outputs[name].stage
            self._underrun_s.labels(stage).inc(playout.underrun_s)
            self._longest_underrun_s.labels(stage).observe(playout.longest_underrun_s)
        latest = {(notes.stage, notes.index): notes for notes in timeline.steps}
        for notes in timeline.steps:
            self._observe_step(notes, is_latest=latest[notes.stage, notes.index] is notes)

    def _observe_step(self, notes: StepNotes, *, is_latest: bool) -> None:
        if notes.accepted_s is not None and notes.ended_s is not None:
            self._step_s.labels(notes.stage).observe(notes.ended_s - notes.accepted_s)
        if notes.sent_s is not None and notes.first_output_s is not None:
            self._step_first_output_s.labels(notes.stage).observe(notes.first_output_s - notes.sent_s)
        if notes.finished is not None:
            usage = notes.finished.usage
            for name, counter in self._work.items():
                amount = getattr(usage, name)
                # An external stage may report any number. A counter rejects negative numbers.
                if 0 < amount < math.inf:
                    counter.labels(notes.stage).inc(amount)
        elif not is_latest:
            self._recoveries.labels(notes.stage, _known_reason(notes.error)).inc()

    def _requests(self) -> Iterator[Metric]:
        orchestrator, loads = self._orchestrator, self._orchestrator.admission.loads
        ended = CounterMetricFamily(
            "stagemesh_requests", "Requests that have ended, by their outcome.", labels=["outcome"]
        )
        for state in _OUTCOMES:
            ended.add_metric([state.value.lower()], orchestrator.totals.requests[state])
        yield ended
        limits = orchestrator.pipeline.limits
        for name, text, value in (
            ("stagemesh_requests_in_flight", "Requests that run.", loads.running.requests),
            ("stagemesh_requests_queued", "Requests that wait for admission.", loads.waiting.requests),
            ("stagemesh_requests_in_flight_limit", "Limit of requests that run.", limits.max_in_flight),
            ("stagemesh_sessions", "Sessions, with an open call or without.", len(orchestrator.sessions)),
            (
                "stagemesh_ready",
                "1 if every stage has a ready replica and every edge a connector.",
                orchestrator.fleet.ready,
            ),
        ):
            yield GaugeMetricFamily(name, text, value)

    def _stages(self) -> Iterator[Metric]:
        attempts = CounterMetricFamily(
            "stagemesh_stage_steps", "Attempts of steps that have ended, by their outcome.", labels=["stage", "outcome"]
        )
        for stage in self._orchestrator.pipeline.stages:
            totals = self._orchestrator.totals.stages.get(stage)
            attempts.add_metric([stage, "finished"], totals.finished if totals else 0)
            attempts.add_metric([stage, "failed"], totals.failed if totals else 0)
        yield attempts

    def _edges(self) -> Iterator[Metric]:
        pipeline, totals = self._orchestrator.pipeline, self._orchestrator.totals.edges
        chunks = CounterMetricFamily("stagemesh_edge_chunks", "Chunks of finished steps.", labels=["edge"])
        size = CounterMetricFamily("stagemesh_edge_bytes", "Payload bytes of the chunks.", labels=["edge"])
        links = GaugeMetricFamily(
            "stagemesh_edge_links",
            "Pairs of replicas that the edge connects, by the connector in use; none if no connector works.",
            labels=["edge", "connector"],
        )
        for edge in (*pipeline.edges, *pipeline.input_edges):
            sent = totals.get(edge.name)
            chunks.add_metric([edge.name], sent.chunks if sent else 0)
            size.add_metric([edge.name], sent.size_bytes if sent else 0)
            connectors = [] if edge.is_input else self._orchestrator.fleet.edge_connectors.links_of(edge)
            counts = Counts(link.probe.connector if link.probe else "none" for link in connectors if link.is_answered)
            for connector, count in counts.items():
                links.add_metric([edge.name, connector], count)
        yield from (chunks, size, links)

    def _replicas(self) -> Iterable[Metric]:
        states = GaugeMetricFamily("stagemesh_replicas", "Replicas by their state.", labels=["stage", "state"])
        labels = ["stage", "replica"]
        used = GaugeMetricFamily("stagemesh_replica_arena_used_bytes", "Bytes of the arena in use.", labels=labels)
        size = GaugeMetricFamily("stagemesh_replica_arena_bytes", "Size of the arena.", labels=labels)
        running = GaugeMetricFamily("stagemesh_replica_running_steps", "Steps that run at the replica.", labels=labels)
        queued = GaugeMetricFamily("stagemesh_replica_queued_steps", "Steps that wait at the replica.", labels=labels)
        for stage, replicas in self._orchestrator.fleet.replicas.items():
            for state, count in Counts(replica.state for replica in replicas).items():
                states.add_metric([stage, state.name.lower()], count)
            for replica in replicas:
                if (report := reported_load(replica)) is not None:
                    used.add_metric([stage, replica.name], report.arena_used_bytes)
                    size.add_metric([stage, replica.name], report.arena_size_bytes)
                    running.add_metric([stage, replica.name], report.running)
                    queued.add_metric([stage, replica.name], report.queued)
        return states, used, size, running, queued


def _known_reason(error: StagemeshError | None) -> str:
    """Returns the reason of an error, or "other" if it is not in the catalogue.

    Stages in other languages could otherwise add any number of time series.
    """
    reason = error.reason if error is not None else ""
    return reason if f"ERROR_REASON_{reason}" in ErrorReason.keys() else "other"  # noqa: SIM118
