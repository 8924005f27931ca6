"""The signals by which stages are scaled, of an orchestrator without connections."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.orchestrator.admission.queue import AdmissionRequest
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.metrics.scaling import StageSignals, signals_by_stage
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.planning.planner import Planner
from stagemesh.orchestrator.planning.replacement_replicas import ReplacementReplicas
from stagemesh.orchestrator.request.lifecycle import RequestLifecycle
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.pipeline import Pipeline
from stagemesh.pipeline.conditions import Fact
from stagemesh.v1 import request_pb2, stage_pb2, tensor_pb2
from tests.orchestrator.mesh import load
from tests.orchestrator.replicas import Clock, ready_replica

VOICE = """
pipeline: voice
stages:
  think: {engine: fake, function: source}
  frame: {engine: fake, function: frames}
  sing: {engine: fake, function: sound}
edges: [{from: think, to: frame}, {from: frame, to: sing}]
outputs: {text: think, voice: sing}
limits: {max_in_flight: 1}
"""
_RATE_HZ = 24_000


class _Voices:
    """An orchestrator of the pipeline without connections. The first request is admitted, the others wait."""

    def __init__(self, pipeline: Pipeline, clock: Clock) -> None:
        self.clock, self.fleet = clock, Fleet(pipeline, (), clock=clock)
        self.orchestrator = Orchestrator(pipeline, self.fleet, max_request_s=60, drain_s=0, clock=clock)

    def request(self, name: str, *, outputs: tuple[str, ...] = ("voice",), choices: int = 1) -> RequestRecord:
        """Adds a request and returns its record."""
        record = RequestRecord(Timeline(name, outputs=outputs, choices=choices, clock=self.clock))
        known = RequestLifecycle(
            record,
            fingerprint=b"",
            seed=1,
            admission=self.orchestrator.admission,
            admission_request=AdmissionRequest(name, choices=choices),
            replacements=ReplacementReplicas(Planner(self.orchestrator.pipeline, self.fleet.registry)),
            facts={Fact("output", output): 1.0 for output in outputs},
            input_planes=self.orchestrator.input_planes,
            clock=self.clock,
        )
        self.orchestrator.requests.add(name, known)
        return record

    def replica(self, name: str, **load: float) -> Replica:
        """Adds a ready replica that reports a load."""
        stage = name.partition("-")[0]
        replica = ready_replica(
            name, self.orchestrator.pipeline, registry=self.fleet.registry, cost=self.fleet.step_costs[stage]
        )
        replica.record_load(stage_pb2.WatchLoadResponse(**load))  # type: ignore[arg-type]
        return replica

    @property
    def signals(self) -> Mapping[str, StageSignals]:
        return signals_by_stage(self.orchestrator)

    @property
    def at_risk(self) -> list[int]:
        """The number of streams at risk at each stage."""
        return [signals.playout_at_risk for signals in self.signals.values()]


@pytest.fixture
async def voices(tmp_path: Path, clock: Clock) -> _Voices:
    return _Voices(load(tmp_path, VOICE), clock)


def _audio(seconds: float, *, begin_s: float = 0.0, index: int = 0, last: bool = False) -> request_pb2.Output:
    count = round(seconds * _RATE_HZ)
    samples = tensor_pb2.Tensor(
        name="audio", dtype=tensor_pb2.DATA_TYPE_FLOAT32, shape=[count], inline=bytes(4 * count)
    )
    output = request_pb2.Output(name="voice", index=index, position=round(begin_s * _RATE_HZ))
    output.audio.CopyFrom(request_pb2.Audio(samples=samples, sample_rate_hz=_RATE_HZ))
    if last:
        output.finish.reason = request_pb2.FINISH_REASON_END
    return output


async def test_a_stream_whose_audio_runs_dry_counts_at_the_stage_that_emits_it(voices: _Voices) -> None:
    record = voices.request("r")
    voices.clock.now_s = 10.0
    record.add_output(_audio(2.0))
    voices.clock.now_s = 11.4
    assert voices.at_risk == [0, 0, 0]
    voices.clock.now_s = 11.6
    assert voices.at_risk == [0, 0, 1]
    record.add_output(_audio(1.0, begin_s=2.0))
    assert voices.at_risk == [0, 0, 0]


async def test_a_stream_is_not_at_risk_before_or_right_after_its_first_audio(voices: _Voices) -> None:
    record = voices.request("r")
    voices.clock.now_s = 30.0
    assert voices.at_risk == [0, 0, 0]
    record.add_output(_audio(0.1))
    voices.clock.now_s = 30.4
    assert voices.at_risk == [0, 0, 0]
    voices.clock.now_s = 30.6
    assert voices.at_risk == [0, 0, 1]


async def test_a_stream_that_has_ended_is_not_at_risk(voices: _Voices) -> None:
    voices.request("r").add_output(_audio(0.1, last=True))
    voices.clock.now_s = 5.0
    assert voices.at_risk == [0, 0, 0]


async def test_text_is_not_played_and_each_choice_is_a_stream(voices: _Voices) -> None:
    record = voices.request("r", outputs=("text", "voice"), choices=2)
    record.add_output(request_pb2.Output(name="text", text="hello"))
    for index in range(2):
        record.add_output(_audio(0.1, index=index))
    voices.clock.now_s = 5.0
    assert voices.at_risk == [0, 0, 2]


async def test_the_first_output_of_a_request_is_the_earliest_of_all_outputs(voices: _Voices) -> None:
    record = voices.request("r", outputs=("text", "voice"))
    voices.clock.now_s = 1.0
    record.add_output(request_pb2.Output(name="text", text="hello"))
    voices.clock.now_s = 2.0
    record.add_output(_audio(0.1))
    assert record.first_outputs_s == {("text", 0): 1.0, ("voice", 0): 2.0}


async def test_requests_that_are_not_planned_wait_for_the_stages_of_their_route(voices: _Voices) -> None:
    voices.replica("think-0", running=1, work_s=2.0)
    voices.replica("sing-0", running=1, work_s=0.5)
    voices.request("running").timeline.note_planned()
    voices.request("text", outputs=("text",))
    voices.request("voice", choices=2)
    waiting = {name: signals.queued_s for name, signals in voices.signals.items()}
    assert waiting == {"think": 3 * 2.0, "frame": 2 * 1.0, "sing": 2 * 0.5}


async def test_a_replicas_queue_is_the_waiting_part_of_its_work(voices: _Voices) -> None:
    replica = voices.replica("think-0")
    replica.load.place()
    replica.record_load(stage_pb2.WatchLoadResponse(running=1, queued=3, work_s=8.0))
    signals = voices.signals["think"]
    assert (signals.queued_s, signals.own_queued_at_replicas_s, signals.own_in_flight) == (6.0, 1.5, 1)
    replica.record_load(stage_pb2.WatchLoadResponse(running=4, work_s=8.0))
    assert voices.signals["think"].queued_s == 0


async def test_the_queue_of_a_replica_that_is_unreachable_does_not_count(voices: _Voices) -> None:
    replica = voices.replica("think-0", running=1, queued=3, work_s=8.0)
    assert voices.signals["think"].queued_s > 0
    replica.observe(ReplicaState.UNREACHABLE, "gone")
    assert voices.signals["think"].queued_s == 0
