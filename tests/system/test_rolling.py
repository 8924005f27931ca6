"""Stages are restarted, drained, added and removed under load, as real processes. No client notices."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import pytest

from stagemesh.client import AsyncClient
from stagemesh.rpc.channels import CHANNEL_OPTIONS
from stagemesh.v1 import admin_pb2
from stagemesh.v1.admin_pb2_grpc import AdminServiceStub
from tests.deployment import Deployment, deployed_for_module
from tests.soak.workload import CHECKPOINT_STEPS, write_pipeline
from tests.system.cluster import CALL_S, cluster, load, until_ready

if TYPE_CHECKING:
    from stagemesh.v1.admin_pb2_grpc import AdminServiceAsyncStub

STAGES = ("source", "frames", "sound")
_STEP_S = 0.05


up = deployed_for_module(lambda folder: write_pipeline(folder, replicas=2, step_s=_STEP_S))


@asynccontextmanager
async def _operator(up: Deployment) -> "AsyncIterator[AdminServiceAsyncStub]":
    async with grpc.aio.insecure_channel(up.admin_endpoint, options=CHANNEL_OPTIONS) as channel:
        yield AdminServiceStub(channel)


@pytest.mark.timeout(180)
async def test_no_client_notices_a_rolling_restart_of_every_stage(up: Deployment) -> None:
    before = {name: up.process_id(name) for name in up.replicas()}
    async with load(up.endpoint), _operator(up) as operator:
        for stage in STAGES:
            request = admin_pb2.RestartReplicasRequest(target=stage)
            phases = [change.phase async for change in operator.RestartReplicas(request, timeout=CALL_S)]
            assert phases.count(admin_pb2.RESTART_PHASE_READY) == 2
    assert not [name for name, process in before.items() if up.runs(name, process)]


@pytest.mark.timeout(180)
async def test_no_client_notices_that_replicas_hand_over_their_steps(up: Deployment) -> None:
    async with _operator(up) as operator:
        async with load(up.endpoint) as running:
            for name in up.replicas():
                while not await _runs_something(operator, name):
                    await asyncio.sleep(_STEP_S)
                request = admin_pb2.DrainReplicasRequest(target=name, wait=True, move_after_s=0.0)
                await operator.DrainReplicas(request, timeout=CALL_S)
                await operator.ResumeReplicas(admin_pb2.ResumeReplicasRequest(target=name), timeout=CALL_S)
        # The requests that moved last have ended by now, too.
        resumed = [await _resumed(operator, request_id) for request_id in running.ended]
    assert any(resumed)


@pytest.mark.timeout(180)
async def test_a_stage_grows_from_one_replica_to_four_and_shrinks_again(tmp_path: Path) -> None:
    with cluster(tmp_path, step_s=_STEP_S) as replicas:
        for stage in STAGES:
            replicas.start(f"{stage}-0")
        async with AsyncClient(replicas.endpoint) as client:
            await until_ready(client, replicas=1)
            async with load(replicas.endpoint) as running:
                for number in (1, 2, 3):
                    replicas.start(f"frames-{number}")
                await until_ready(client, replicas=4)
                # The first replica leaves, too.
                for number in (0, 2, 1):
                    replicas.terminate(f"frames-{number}")
                await until_ready(client, replicas=1)
    assert not [delivery.error for delivery in running.ended.values() if delivery.error]


async def _runs_something(operator: "AdminServiceAsyncStub", name: str) -> bool:
    listed = await operator.ListRequests(admin_pb2.ListRequestsRequest(target=name), timeout=CALL_S)
    return bool(listed.requests)


async def _resumed(operator: "AdminServiceAsyncStub", request_id: str) -> bool:
    """Returns whether a stage resumed elsewhere after a pause. Not known for requests that ended long ago."""
    try:
        answer = await operator.GetRequest(admin_pb2.GetRequestRequest(request_id=request_id), timeout=CALL_S)
    except grpc.aio.AioRpcError as exc:
        assert exc.code() is grpc.StatusCode.NOT_FOUND  # noqa: PT017
        return False
    handed_on = {step.stage for step in answer.steps if step.error.reason == "DRAINED"}
    # Every stage also reports checkpoints periodically. A pause happens at any step.
    return any(step.resumed_engine_steps % CHECKPOINT_STEPS for step in answer.steps if step.stage in handed_on)
