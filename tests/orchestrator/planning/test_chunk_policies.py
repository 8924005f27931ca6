"""The chunk policies of requests: what requests ask for, and what replicas have measured."""

from pathlib import Path

import pytest

from stagemesh.common.wire.chunk_sizes import ChunkPolicy, FramesPolicy, PlayoutPace, WholePolicy
from stagemesh.orchestrator.fleet.replica_registry import ReplicaRegistry
from stagemesh.orchestrator.planning.chunk_policies import set_chunk_policies
from stagemesh.orchestrator.planning.planner import Plan, Planner
from stagemesh.v1 import playout_pb2, request_pb2, stage_pb2
from tests.orchestrator.mesh import load
from tests.orchestrator.replicas import ready_replica

# Measured on a GPU (a vocoder of 12.5 frames a second), and assumed for a CPU.
GPU_S = {4: 0.0116, 32: 0.0144}
CPU_S = {4: 0.15, 8: 0.25, 16: 0.45, 32: 0.7}

SPEECH = """
pipeline: speech
stages:
  thinker: {engine: fake, function: source}
  talker: {engine: fake, function: frames}
  vocoder: {engine: fake, function: sound}
edges:
  - {from: thinker, to: talker}
  - {from: talker, to: vocoder, chunk: CHUNK}
outputs: {audio: vocoder}
"""


def _plan(folder: Path, chunk: str, *, costs_s: dict[int, float] | None = None, delay_s: float = 0.0) -> Plan:
    pipeline, registry = load(folder, SPEECH.replace("CHUNK", chunk)), ReplicaRegistry()
    replicas = {stage: ready_replica(f"{stage}-0", pipeline, registry=registry) for stage in pipeline.stages}
    if costs_s:
        emitted = playout_pb2.PlayoutMeasures(frame_intervals_s={"frames": 0.01, "other": 9.0})
        replicas["talker"].record_load(stage_pb2.WatchLoadResponse(playout=emitted))
        costs = [playout_pb2.CallCost(frames=frames, seconds=cost_s) for frames, cost_s in costs_s.items()]
        measured = playout_pb2.PlayoutMeasures(call_costs=costs, frame_audio_s=0.08, audio_delay_s=delay_s)
        replicas["vocoder"].record_load(stage_pb2.WatchLoadResponse(playout=measured))
    return Planner(pipeline, registry).plan(pipeline.route(["audio"]))


def _policy(plan: Plan, **given: object) -> ChunkPolicy:
    chunk = request_pb2.ChunkParameters(**given)  # type: ignore[arg-type]
    stages = {"vocoder": request_pb2.StageParameters(chunk=chunk)} if given else {}
    set_chunk_policies(plan, request_pb2.Parameters(stages=stages))
    return plan.route.edges[1].policy


@pytest.mark.parametrize(
    ("chunk", "given", "policy"),
    [
        ("{frames: 25}", {}, FramesPolicy(25)),
        ("{frames: 25}", {"initial_frames": 25}, FramesPolicy(25, (25,))),
        ("{frames: 25, initial_frames: 4}", {}, FramesPolicy(25, (4,))),
        ("{frames: 25, initial_frames: 4}", {"initial_frames": 10}, FramesPolicy(25, (10,))),
        ("{frames: 25, initial_frames: 4, left_context_frames: 3}", {"whole": True}, WholePolicy()),
        ("{frames: 25, ramp: [4, 8, 8]}", {}, FramesPolicy(25, (4, 8, 8))),
        ("{frames: 25, ramp: [4, 8, 16]}", {"initial_frames": 5}, FramesPolicy(25, (5, 8, 16))),
        ("{frames: 25, ramp: [4], left_context_frames: 3}", {"initial_frames": 9}, FramesPolicy(25, (9,), 3)),
        ("{frames: 25, ramp: [4]}", {"whole": False}, FramesPolicy(25, (4,))),
        ("{frames: 25, initial_frames: 4, ramp: auto}", {}, FramesPolicy(25, (4, 8, 16))),
        ("{frames: 25, initial_frames: 4, ramp: auto}", {"initial_frames": 9}, FramesPolicy(25, (9, 18))),
        ("{frames: 25, initial_frames: 25, ramp: auto}", {"whole": True}, WholePolicy()),
    ],
)
def test_a_request_sets_its_first_chunk(
    tmp_path: Path, chunk: str, given: dict[str, object], policy: ChunkPolicy
) -> None:
    assert _policy(_plan(tmp_path, chunk), **given) == policy


def test_the_policy_contains_the_measured_pace_of_both_replicas(tmp_path: Path) -> None:
    chunk = "{frames: 25, initial_frames: 2, ramp: auto, left_context_frames: 1}"
    pace = PlayoutPace(0.01, 0.08, GPU_S, reserve_s=0.005)
    assert _policy(_plan(tmp_path, chunk, costs_s=GPU_S)) == FramesPolicy(25, (2, 4, 8, 16), 1, pace)
    assert _policy(_plan(tmp_path, chunk, costs_s=GPU_S), initial_frames=5) == FramesPolicy(25, (5, 10, 20), 1, pace)


def test_a_replica_with_other_requests_may_let_a_chunk_wait_for_two_calls(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "{frames: 25, initial_frames: 2, ramp: auto}", costs_s=CPU_S, delay_s=0.02)
    plan.steps["vocoder"].replica.load.place()
    pace = PlayoutPace(0.01, 0.08, CPU_S, reserve_s=0.005 + 0.02 + 2 * CPU_S[32])
    assert _policy(plan) == FramesPolicy(25, (2, 4, 8, 16), pace=pace)


def test_a_chunk_is_ready_earlier_by_the_audio_that_the_consumer_retains(tmp_path: Path) -> None:
    plan = _plan(tmp_path, "{frames: 25, initial_frames: 2, ramp: auto}", costs_s=GPU_S, delay_s=0.025)
    pace = PlayoutPace(0.01, 0.08, GPU_S, reserve_s=0.005 + 0.025)
    assert _policy(plan) == FramesPolicy(25, (2, 4, 8, 16), pace=pace)


def test_a_fixed_ramp_has_no_pace(tmp_path: Path) -> None:
    assert _policy(_plan(tmp_path, "{frames: 25, ramp: [4]}", costs_s=GPU_S)) == FramesPolicy(25, (4,))


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -1.0])
@pytest.mark.parametrize("measured", ["delay", "cost"])
def test_a_measurement_that_cannot_be_is_ignored(tmp_path: Path, wrong: float, measured: str) -> None:
    costs_s, delay_s = (GPU_S, wrong) if measured == "delay" else ({32: wrong}, 0.0)
    plan = _plan(tmp_path, "{frames: 25, initial_frames: 4, ramp: auto}", costs_s=costs_s, delay_s=delay_s)
    assert _policy(plan) == FramesPolicy(25, (4, 8, 16))
