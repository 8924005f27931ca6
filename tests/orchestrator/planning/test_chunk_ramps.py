"""The sizes of the first chunks: their choice from measured costs, and the policies of requests."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.connectors.flow.chunking import ChunkPolicy, FramesPolicy, WholePolicy
from stagemesh.orchestrator.fleet.replica_registry import ReplicaRegistry
from stagemesh.orchestrator.planning.chunk_ramps import Pace, choose_sizes, climb, set_chunk_sizes
from stagemesh.orchestrator.planning.planner import Plan, Planner
from stagemesh.orchestrator.spec import load_pipeline
from stagemesh.v1 import request_pb2, stage_pb2
from tests.orchestrator.replicas import ready_replica

SIZES = (1, 2, 4, 8, 16, 25)
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


@pytest.mark.parametrize(
    ("pace", "chosen"),
    [
        (Pace(0.01, 0.08, GPU_S), [1, 4, 25]),
        (Pace(0.01, 0.08, GPU_S, is_shared=True), [1, 4, 25]),
        (Pace(0.03, 0.08, {4: 0.04, 32: 0.08}), [1, 2, 4, 8, 16, 25]),
        (Pace(0.03, 0.08, {4: 0.04, 32: 0.08}, is_shared=True), [4, 4, 8, 16, 25]),
        (Pace(0.03, 0.08, CPU_S), [16, 25]),
        (Pace(0.03, 0.08, CPU_S, is_shared=True), [25]),
        (Pace(0.06, 0.08, GPU_S), [2, 2, 2, 2, 4, 4, 4, 8, 8, 8, 16, 16, 25]),
        # The producer is slower than the play-out.
        (Pace(0.09, 0.08, GPU_S), [25]),
        # So is the consumer.
        (Pace(0.01, 0.08, {32: 3.0}), [25]),
    ],
    ids=["gpu", "busy gpu", "loaded", "busy loaded", "cpu", "busy cpu", "slow talker", "slower", "slow consumer"],
)
def test_sizes_grow_as_fast_as_the_costs_permit(pace: Pace, chosen: Sequence[int]) -> None:
    assert list(choose_sizes(SIZES, pace)) == chosen


def test_a_producer_as_fast_as_the_play_out_keeps_a_small_size() -> None:
    assert set(choose_sizes(SIZES, Pace(0.079, 0.08, GPU_S))) == {8}


def test_a_small_size_is_not_repeated_if_its_calls_take_much_time() -> None:
    assert list(choose_sizes((4, 8, 16), Pace(0.06, 0.08, {16: 0.03}))) == [4, 4, 4, 4, 8, 8, 8, 16]
    assert list(choose_sizes((4, 8, 16), Pace(0.06, 0.08, {16: 0.06}))) == [8, 8, 8, 8, 16]
    assert list(choose_sizes((4, 8, 16), Pace(0.06, 0.08, {16: 0.12}))) == [16]


def test_repeated_frames_cost_time() -> None:
    pace = Pace(0.01, 0.08, {1: 0.01, 2: 0.02, 4: 0.04, 8: 0.08, 16: 0.16, 32: 0.32, 64: 0.64})
    assert list(choose_sizes(SIZES, pace)) == [1, 4, 16, 25]
    assert list(choose_sizes(SIZES, pace, context=25)) == [1, 2, 4, 16, 25]


def test_a_small_call_costs_at_most_as_much_as_a_large_one() -> None:
    # The first call of a process takes long, and this size is not chosen again until that is forgotten.
    pace = Pace(0.01, 0.08, {1: 9.0, 32: 0.02})
    assert [pace.cost_s(1), pace.cost_s(30), pace.cost_s(64)] == [0.02, 0.02, 0.04]


@given(
    frame_interval_s=st.floats(0.001, 0.1),
    costs_s=st.lists(st.floats(0.001, 0.5), min_size=6, max_size=6),
    waits=st.lists(st.floats(0, 1), min_size=40, max_size=40),
    context=st.sampled_from([0, 25]),
)
def test_play_out_never_waits(frame_interval_s: float, costs_s: list[float], waits: list[float], context: int) -> None:
    by_frames = dict(zip((1, 2, 4, 8, 16, 64), sorted(costs_s), strict=True))
    pace = Pace(frame_interval_s, 0.08, by_frames, is_shared=True)
    sizes = climb(SIZES, pace, context=context)
    frames, free_s, dry_s = 0, 0.0, 0.0
    for number, size in enumerate(sizes or ()):
        # Every call may wait for two calls of other requests of any size.
        cost_s = pace.cost_s(size + min(context, frames))
        frames += size
        wait_s = 2 * waits[number] * pace.cost_s(SIZES[-1] + context) if number else 0.0
        free_s = max(free_s, frames * frame_interval_s) + wait_s + cost_s
        assert not number or free_s <= dry_s
        dry_s = (dry_s or free_s) + size * 0.08


def _plan(folder: Path, chunk: str, *, costs_s: dict[int, float] | None = None) -> Plan:
    path = folder / "speech.yaml"
    path.write_text(SPEECH.replace("CHUNK", chunk))
    pipeline, registry = load_pipeline(str(path)), ReplicaRegistry()
    replicas = {stage: ready_replica(f"{stage}-0", pipeline, registry=registry) for stage in pipeline.stages}
    if costs_s:
        replicas["talker"].record_load(stage_pb2.WatchLoadResponse(frame_intervals_s={"frames": 0.01, "other": 9.0}))
        costs = [stage_pb2.CallCost(frames=frames, seconds=cost_s) for frames, cost_s in costs_s.items()]
        replicas["vocoder"].record_load(stage_pb2.WatchLoadResponse(call_costs=costs, frame_audio_s=0.08))
    return Planner(pipeline, registry).plan(pipeline.route(["audio"]))


def _policy(plan: Plan, **given: object) -> ChunkPolicy:
    chunk = request_pb2.ChunkParameters(**given)  # type: ignore[arg-type]
    stages = {"vocoder": request_pb2.StageParameters(chunk=chunk)} if given else {}
    set_chunk_sizes(plan, request_pb2.Parameters(stages=stages))
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


def test_measured_replicas_determine_the_ramp(tmp_path: Path) -> None:
    chunk = "{frames: 25, initial_frames: 2, ramp: auto, left_context_frames: 1}"
    assert _policy(_plan(tmp_path, chunk, costs_s=GPU_S)) == FramesPolicy(25, (2, 8), 1)
    assert _policy(_plan(tmp_path, chunk, costs_s=CPU_S)) == FramesPolicy(25, (16,), 1)
    assert _policy(_plan(tmp_path, chunk, costs_s=GPU_S), initial_frames=5) == FramesPolicy(25, (5,), 1)


def test_a_replica_with_other_requests_may_let_a_chunk_wait(tmp_path: Path) -> None:
    chunk = "{frames: 25, initial_frames: 2, ramp: auto}"
    alone, shared = (_plan(tmp_path, chunk, costs_s=CPU_S) for _ in range(2))
    shared.steps["vocoder"].replica.load.place()
    assert (_policy(alone), _policy(shared)) == (FramesPolicy(25, (2, 4, 8)), FramesPolicy(25))


@pytest.mark.parametrize("cost_s", [float("nan"), float("inf"), -1.0])
def test_a_measurement_that_cannot_be_is_ignored(tmp_path: Path, cost_s: float) -> None:
    plan = _plan(tmp_path, "{frames: 25, initial_frames: 4, ramp: auto}", costs_s={32: cost_s})
    assert _policy(plan) == FramesPolicy(25, (4, 8, 16))
