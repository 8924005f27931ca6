"""The signals by which stages are scaled, of an orchestrator without connections."""

from collections.abc import Callable
from pathlib import Path

import pytest

from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.orchestrator.admission.queue import AdmissionRequest
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.metrics.scaling import ScalingSignals
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.planning.planner import Planner
from stagemesh.orchestrator.planning.replacement_replicas import Failover
from stagemesh.orchestrator.request.lifecycle import RequestLifecycle
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.orchestrator.request.timeline import Timeline
from stagemesh.pipeline import load_pipeline
from stagemesh.pipeline.conditions import Fact
from stagemesh.v1 import request_pb2, stage_pb2, tensor_pb2
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


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def orchestrator(tmp_path: Path, clock: Clock) -> Orchestrator:
    path = tmp_path / "voice.yaml"
    path.write_text(VOICE)
    pipeline = load_pipeline(str(path))
    return Orchestrator(pipeline, Fleet(pipeline, (), clock=clock), max_request_s=60, drain_s=0, clock=clock)


@pytest.fixture
async def request_of(orchestrator: Orchestrator, clock: Clock) -> Callable[..., RequestRecord]:
    """Returns a function that adds a request. The first request is admitted, the others wait."""

    def add(name: str, *, outputs: tuple[str, ...] = ("voice",), choices: int = 1) -> RequestRecord:
        record = RequestRecord(Timeline(name, outputs=outputs, choices=choices, clock=clock))
        known = RequestLifecycle(
            record,
            fingerprint=b"",
            seed=1,
            admission=orchestrator.admission,
            admission_request=AdmissionRequest(name, choices=choices),
            failover=Failover(Planner(orchestrator.pipeline, orchestrator.fleet.registry)),
            facts={Fact("output", output): 1.0 for output in outputs},
            clock=clock,
        )
        orchestrator.requests.add(name, known)
        return record

    return add


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


def _at_risk(orchestrator: Orchestrator) -> dict[str, int]:
    return {name: signals.playout_at_risk for name, signals in ScalingSignals(orchestrator).by_stage().items()}


async def test_a_stream_whose_audio_runs_dry_counts_at_the_stage_that_emits_it(
    orchestrator: Orchestrator, clock: Clock, request_of: Callable[..., RequestRecord]
) -> None:
    record = request_of("r")
    clock.now_s = 10.0
    record.add_output(_audio(2.0))
    clock.now_s = 11.4
    assert _at_risk(orchestrator) == {"think": 0, "frame": 0, "sing": 0}
    clock.now_s = 11.6
    assert _at_risk(orchestrator) == {"think": 0, "frame": 0, "sing": 1}
    record.add_output(_audio(1.0, begin_s=2.0))
    assert _at_risk(orchestrator)["sing"] == 0


async def test_a_stream_is_not_at_risk_before_or_right_after_its_first_audio(
    orchestrator: Orchestrator, clock: Clock, request_of: Callable[..., RequestRecord]
) -> None:
    record = request_of("r")
    clock.now_s = 30.0
    assert _at_risk(orchestrator)["sing"] == 0
    record.add_output(_audio(0.1))
    clock.now_s = 30.4
    assert _at_risk(orchestrator)["sing"] == 0
    clock.now_s = 30.6
    assert _at_risk(orchestrator)["sing"] == 1


async def test_a_stream_that_has_ended_is_not_at_risk(
    orchestrator: Orchestrator, clock: Clock, request_of: Callable[..., RequestRecord]
) -> None:
    record = request_of("r")
    record.add_output(_audio(0.1, last=True))
    clock.now_s = 5.0
    assert _at_risk(orchestrator)["sing"] == 0


async def test_text_is_not_played_and_each_choice_is_a_stream(
    orchestrator: Orchestrator, clock: Clock, request_of: Callable[..., RequestRecord]
) -> None:
    record = request_of("r", outputs=("text", "voice"), choices=2)
    record.add_output(request_pb2.Output(name="text", text="hello"))
    for index in range(2):
        record.add_output(_audio(0.1, index=index))
    clock.now_s = 5.0
    assert _at_risk(orchestrator) == {"think": 0, "frame": 0, "sing": 2}


async def test_the_first_output_of_a_request_is_the_earliest_of_all_outputs(
    clock: Clock, request_of: Callable[..., RequestRecord]
) -> None:
    record = request_of("r", outputs=("text", "voice"))
    clock.now_s = 1.0
    record.add_output(request_pb2.Output(name="text", text="hello"))
    clock.now_s = 2.0
    record.add_output(_audio(0.1))
    assert record.first_outputs_s == {("text", 0): 1.0, ("voice", 0): 2.0}


async def test_requests_that_are_not_planned_wait_for_the_stages_of_their_route(
    orchestrator: Orchestrator, request_of: Callable[..., RequestRecord]
) -> None:
    for stage, cost_s in (("think", 2.0), ("sing", 0.5)):
        replica = ready_replica(f"{stage}-0", orchestrator.pipeline, cost=orchestrator.fleet.step_cost(stage))
        replica.record_load(stage_pb2.WatchLoadResponse(running=1, work_s=cost_s))
    request_of("running").timeline.note_planned()
    request_of("text", outputs=("text",))
    request_of("voice", choices=2)
    waiting = {name: signals.queued_s for name, signals in ScalingSignals(orchestrator).by_stage().items()}
    assert waiting == {"think": 3 * 2.0, "frame": 2 * 1.0, "sing": 2 * 0.5}


async def test_a_replicas_queue_is_the_waiting_part_of_its_work(orchestrator: Orchestrator) -> None:
    replica = ready_replica("think-0", orchestrator.pipeline, registry=orchestrator.fleet.registry)
    replica.load.place()
    replica.record_load(stage_pb2.WatchLoadResponse(running=1, queued=3, work_s=8.0))
    signals = ScalingSignals(orchestrator).by_stage()["think"]
    assert (signals.queued_s, signals.own_queued_at_replicas_s) == (6.0, 1.5)
    assert signals.own_in_flight == 1
    replica.record_load(stage_pb2.WatchLoadResponse(running=4, work_s=8.0))
    assert ScalingSignals(orchestrator).by_stage()["think"].queued_s == 0


async def test_the_queue_of_a_replica_that_is_unreachable_does_not_count(orchestrator: Orchestrator) -> None:
    replica = ready_replica("think-0", orchestrator.pipeline, registry=orchestrator.fleet.registry)
    replica.record_load(stage_pb2.WatchLoadResponse(running=1, queued=3, work_s=8.0))
    replica.observe(ReplicaState.UNREACHABLE, "gone")
    assert ScalingSignals(orchestrator).by_stage()["think"].queued_s == 0
