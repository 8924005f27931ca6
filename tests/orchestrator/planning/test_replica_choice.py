"""The replica with the least work gets a request, and the nearest one of equals."""

import random

from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_registry import ReadyReplicas, ReplicaRegistry
from stagemesh.orchestrator.planning.planner import LeastWork, Planner
from stagemesh.pipeline import Pipeline
from tests.orchestrator.replicas import ready_replica


def _ready(*replicas: Replica) -> ReadyReplicas:
    ready = ReadyReplicas()
    for replica in replicas:
        ready.add(replica)
    return ready


def _picks(ready: ReadyReplicas, *near: Replica, count: int = 200) -> set[str]:
    choice = LeastWork(random.Random(7))
    picked = {choice.choose(ready, near=near) for _ in range(count)}
    return {replica.name for replica in picked if replica is not None}


def test_the_replica_with_less_work_is_chosen(pipeline: Pipeline) -> None:
    idle, busy = ready_replica("b-0", pipeline), ready_replica("b-1", pipeline)
    busy.load.report(2.0, steps=1)
    assert _picks(_ready(idle, busy)) == {"b-0"}


def test_the_busiest_replica_is_never_chosen(pipeline: Pipeline) -> None:
    replicas = [ready_replica(f"b-{number}", pipeline) for number in range(10)]
    replicas[3].load.report(2.0, steps=1)
    assert _picks(_ready(*replicas)) == {f"b-{number}" for number in range(10)} - {"b-3"}


def test_a_replica_on_the_same_host_is_found_among_many(pipeline: Pipeline) -> None:
    producer = ready_replica("a-0", pipeline, host="here", zone="z")
    near = ready_replica("b-near", pipeline, host="here", zone="z")
    far = [ready_replica(f"b-{number}", pipeline, host=f"h{number}", zone="z") for number in range(100)]
    assert _picks(_ready(near, *far), producer) == {"b-near"}


def test_a_replica_in_the_same_zone_is_preferred(pipeline: Pipeline) -> None:
    producer = ready_replica("a-0", pipeline, host="here", zone="z")
    near = ready_replica("b-near", pipeline, host="there", zone="z")
    far = [ready_replica(f"b-{number}", pipeline, host=f"h{number}", zone="y") for number in range(100)]
    assert _picks(_ready(near, *far), producer) == {"b-near"}


def test_locality_does_not_outweigh_work(pipeline: Pipeline) -> None:
    producer = ready_replica("a-0", pipeline, host="here")
    near, far = ready_replica("b-near", pipeline, host="here"), ready_replica("b-far", pipeline, host="there")
    near.load.report(0.5, steps=1)
    assert _picks(_ready(near, far), producer) == {"b-far"}


def test_replicas_to_avoid_are_never_chosen(pipeline: Pipeline) -> None:
    replicas = [ready_replica(f"b-{number}", pipeline) for number in range(4)]
    choice = LeastWork(random.Random(7))
    picked = {choice.choose(_ready(*replicas), avoid=replicas[1:]) for _ in range(50)}
    assert picked == {replicas[0]}
    assert choice.choose(_ready(*replicas), avoid=replicas) is None


def test_a_plan_keeps_adjacent_stages_on_one_host(pipeline: Pipeline) -> None:
    registry = ReplicaRegistry()
    for host in range(20):
        for stage in pipeline.stages:
            ready_replica(f"{stage}-{host}", pipeline, registry=registry, host=f"h{host}")
    planner = Planner(pipeline, registry)
    for _ in range(20):
        plan = planner.plan(pipeline.route(["last"]))
        assert len({step.replica.host for step in plan.steps.values()}) == 1
        plan.release()


def test_uneven_work_queues_less_than_with_round_robin(pipeline: Pipeline) -> None:
    """Simulates ten replicas. Every tenth request takes twenty times as long as the others."""
    rng = random.Random(3)
    sizes = [20.0 if rng.random() < 0.1 else 1.0 for _ in range(3000)]

    def longest_wait(*, by_turns: bool) -> float:
        left_s = [0.0] * 10
        replicas = [ready_replica(f"b-{number}", pipeline) for number in range(10)]
        ready, choice, waits = _ready(*replicas), LeastWork(random.Random(5)), []
        for number, size in enumerate(sizes):
            left_s[:] = [max(0.0, left - 0.32) for left in left_s]
            for replica, left in zip(replicas, left_s, strict=True):
                replica.load.report(left, steps=1)
            picked = replicas[number % 10] if by_turns else choice.choose(ready)
            assert picked is not None
            waits.append(left_s[replicas.index(picked)])
            left_s[replicas.index(picked)] += size
        return sorted(waits)[int(0.99 * len(waits))]

    assert longest_wait(by_turns=True) >= 2 * longest_wait(by_turns=False)
