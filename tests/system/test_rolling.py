"""Stages are restarted, drained, added and removed under load, as real processes. No client notices."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING

import grpc
import pytest

from stagemesh.client import AsyncClient
from stagemesh.common.errors import UnavailableError
from stagemesh.common.process_config import dump_config
from stagemesh.common.stage_config import OrchestratorAddress, StageConfig
from stagemesh.orchestrator.config import OrchestratorConfig, Registration
from stagemesh.orchestrator.launcher.ports import PortPicker
from stagemesh.orchestrator.spec import load_pipeline
from stagemesh.rpc.channels import CHANNEL_OPTIONS
from stagemesh.v1 import admin_pb2, stage_pb2
from stagemesh.v1.admin_pb2_grpc import AdminServiceStub
from tests.deployment import Deployment, deployed
from tests.soak.load import Load
from tests.soak.work import Work
from tests.soak.workload import CHECKPOINT_STEPS, OUTPUT_OF, requests, units, write_pipeline

if TYPE_CHECKING:
    from stagemesh.v1.admin_pb2_grpc import AdminServiceAsyncStub

STAGES = ("source", "frames", "sound")
_STEPS = (8, 24)
_STEP_S = 0.05
_CLIENTS = 4
_CALL_S = 60.0
_READY_S = 90.0


class _Cluster:
    """An orchestrator and replicas that register with it, as processes without a supervisor."""

    def __init__(self, folder: Path) -> None:
        ports = PortPicker()
        self.endpoint, self._admin_endpoint = f"127.0.0.1:{ports.pick()}", f"127.0.0.1:{ports.pick()}"
        self._folder = folder
        path = write_pipeline(folder, replicas=1, step_s=_STEP_S)
        self._pipeline = load_pipeline(str(path))
        config = OrchestratorConfig(
            str(path), {}, self.endpoint, admin_listen=self._admin_endpoint, registration=Registration()
        )
        self._orchestrator = self._run("stagemesh.orchestrator", dump_config(config), name="orchestrator")
        self._replicas: dict[str, Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Starts a replica of the stage with whose name its own name begins."""
        self._replicas[name] = self._start(name)

    def terminate(self, name: str) -> None:
        """Sends SIGTERM to a replica and waits for its end."""
        self._replicas[name].terminate()

    def end(self) -> None:
        """Terminates all processes. Each replica must exit with status 0."""
        for name in self._replicas:
            self.terminate(name)
        try:
            statuses = {name: process.wait(_CALL_S) for name, process in self._replicas.items()}
        finally:
            for process in (self._orchestrator, *self._replicas.values()):
                process.kill()
                process.wait()
        assert not any(statuses.values()), f"replicas ended with {statuses}"

    def _start(self, name: str) -> "Popen[bytes]":
        stage = self._pipeline.stages[name.rpartition("-")[0]]
        config = StageConfig(
            pipeline=self._pipeline.name,
            generation=self._pipeline.generation,
            stage=stage.name,
            replica=name,
            engine=stage.engine,
            function=stage.function,
            options=stage.options,
            listen="127.0.0.1:0",
            orchestrators=(OrchestratorAddress(self._admin_endpoint),),
            parent_pid=os.getpid(),
        )
        return self._run("stagemesh.services.stage", dump_config(config), name=config.replica)

    def _run(self, module: str, config: bytes, *, name: str) -> "Popen[bytes]":
        path = self._folder / f"{name}.json"
        path.write_bytes(config)
        return Popen([sys.executable, "-m", module, "--config", str(path)])


@contextmanager
def _cluster(folder: Path) -> Iterator[_Cluster]:
    cluster = _Cluster(folder)
    try:
        yield cluster
    finally:
        cluster.end()


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(write_pipeline(tmp_path_factory.mktemp("rolling"), replicas=2, step_s=_STEP_S)) as up:
        yield up


@asynccontextmanager
async def _load(endpoint: str) -> AsyncIterator[Load]:
    """Keeps a steady load within the block. Every request must bring its exact outputs."""
    work = Work(requests(3, count=8, steps=_STEPS), OUTPUT_OF, units)
    load, stop = Load(endpoint, work), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(load.until(stop, clients=_CLIENTS))
        yield load
        stop.set()
    wrong = {name: each.error or each.flaws() for name, each in load.ended.items() if not each.whole() or each.flaws()}
    assert not wrong
    assert len(load.ended) >= _CLIENTS


@asynccontextmanager
async def _operator(up: Deployment) -> "AsyncIterator[AdminServiceAsyncStub]":
    async with grpc.aio.insecure_channel(up.admin_endpoint, options=CHANNEL_OPTIONS) as channel:
        yield AdminServiceStub(channel)


@pytest.mark.timeout(180)
async def test_no_client_notices_a_rolling_restart_of_every_stage(up: Deployment) -> None:
    before = {name: up.process_id(name) for name in up.replicas()}
    async with _load(up.endpoint), _operator(up) as operator:
        for stage in STAGES:
            request = admin_pb2.RestartReplicasRequest(target=stage)
            phases = [change.phase async for change in operator.RestartReplicas(request, timeout=_CALL_S)]
            assert phases.count(admin_pb2.RESTART_PHASE_READY) == 2
    assert not [name for name, process in before.items() if up.runs(name, process)]


@pytest.mark.timeout(180)
async def test_no_client_notices_that_replicas_hand_over_their_steps(up: Deployment) -> None:
    async with _operator(up) as operator:
        async with _load(up.endpoint) as load:
            for name in up.replicas():
                while not await _runs_something(operator, name):
                    await asyncio.sleep(_STEP_S)
                request = admin_pb2.DrainReplicasRequest(target=name, wait=True, move_after_s=0.0)
                await operator.DrainReplicas(request, timeout=_CALL_S)
                await operator.ResumeReplicas(admin_pb2.ResumeReplicasRequest(target=name), timeout=_CALL_S)
        # The requests that moved last have ended by now, too.
        resumed = [await _resumed(operator, request_id) for request_id in load.ended]
    assert any(resumed)


@pytest.mark.timeout(180)
async def test_a_stage_grows_from_one_replica_to_four_and_shrinks_again(tmp_path: Path) -> None:
    with _cluster(tmp_path) as cluster:
        for stage in STAGES:
            cluster.start(f"{stage}-0")
        async with AsyncClient(cluster.endpoint) as client:
            await _until_ready(client, replicas=1)
            async with _load(cluster.endpoint):
                for number in (1, 2, 3):
                    cluster.start(f"frames-{number}")
                await _until_ready(client, replicas=4)
                # The first replica leaves, too.
                for number in (0, 2, 1):
                    cluster.terminate(f"frames-{number}")
                await _until_ready(client, replicas=1)


async def _runs_something(operator: "AdminServiceAsyncStub", name: str) -> bool:
    listed = await operator.ListRequests(admin_pb2.ListRequestsRequest(target=name), timeout=_CALL_S)
    return bool(listed.requests)


async def _resumed(operator: "AdminServiceAsyncStub", request_id: str) -> bool:
    """Returns whether a stage resumed elsewhere after a pause. Not known for requests that ended long ago."""
    try:
        answer = await operator.GetRequest(admin_pb2.GetRequestRequest(request_id=request_id), timeout=_CALL_S)
    except grpc.aio.AioRpcError as exc:
        assert exc.code() is grpc.StatusCode.NOT_FOUND  # noqa: PT017
        return False
    handed_on = {step.stage for step in answer.steps if step.error.reason == "DRAINED"}
    # Every stage also reports checkpoints periodically. A pause happens at any step.
    return any(step.resumed_steps % CHECKPOINT_STEPS for step in answer.steps if step.stage in handed_on)


async def _until_ready(client: AsyncClient, *, replicas: int) -> None:
    """Waits until stage `frames` has exactly `count` ready replicas, and every other stage has one."""
    async with asyncio.timeout(_READY_S):
        while not await _has(client, replicas):
            await asyncio.sleep(0.1)


async def _has(client: AsyncClient, replicas: int) -> bool:
    try:
        stages = (await client.describe()).stages
    except UnavailableError:
        return False
    return all(
        [replica.state for replica in stage.replicas]
        == [stage_pb2.REPLICA_STATE_READY] * (replicas if stage.name == "frames" else 1)
        for stage in stages
    )
