"""Replicas without processes, for tests of pure logic."""

from collections.abc import Callable
from typing import cast

from stagemesh.common.wire.versions import own_protocol
from stagemesh.orchestrator.fleet.membership import Member
from stagemesh.orchestrator.fleet.replica import Replica, StepCost
from stagemesh.orchestrator.fleet.replica_client import ReplicaClient
from stagemesh.orchestrator.fleet.replica_registry import ReplicaRegistry
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import stage_pb2


class Clock:
    """Time that the test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def ready_description(
    stage: str, *, pipeline: Pipeline | None = None, generation: str = "", host: str = "", zone: str = ""
) -> stage_pb2.DescribeResponse:
    """Returns the description of a ready replica."""
    return stage_pb2.DescribeResponse(
        pipeline=pipeline.name if pipeline else "",
        generation=generation or (pipeline.generation if pipeline else ""),
        stage=stage,
        protocol=own_protocol(),
        state=stage_pb2.REPLICA_STATE_READY,
        host=host,
        zone=zone,
    )


def ready_replica(
    name: str,
    pipeline: Pipeline,
    *,
    registry: ReplicaRegistry | None = None,
    generation: str = "",
    host: str = "",
    zone: str = "",
    cost: StepCost | None = None,
    clock: Callable[[], float] = Clock(),  # noqa: B008
) -> Replica:
    """Returns a ready replica of the stage with which its name begins ("b-0"), and adds it to the registry."""
    stage = name.split("-", maxsplit=1)[0]

    def changed() -> None:
        if registry is not None:
            registry.update(replica)

    replica = Replica(
        Member(stage, f"h:{name}", name), cast("ReplicaClient", None), on_change=changed, cost=cost, clock=clock
    )
    if registry is not None:
        registry.add(replica)
    described = ready_description(stage, pipeline=pipeline, generation=generation, host=host, zone=zone)
    replica.observe_description(described, pipeline, generations={generation})
    return replica
