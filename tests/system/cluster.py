"""Replicas that register with an orchestrator, as processes without a supervisor, and a steady load on them."""

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from subprocess import Popen

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.cli.launcher.process_configs import stage_config
from stagemesh.client import AsyncClient
from stagemesh.common.errors import UnavailableError
from stagemesh.common.process.config import ProcessConfig
from stagemesh.common.process.stage_process import OrchestratorAddress
from stagemesh.orchestrator.config import OrchestratorConfig, Registration
from stagemesh.pipeline import load_pipeline
from stagemesh.v1 import stage_pb2
from tests.children import config_command
from tests.orchestrator.mesh import poll
from tests.soak.load import Load
from tests.soak.work import Work
from tests.soak.workload import OUTPUT_OF, requests, units, write_pipeline

CALL_S = 60.0
_STEPS = (8, 24)
_CLIENTS = 4
_READY_S = 90.0


class Cluster:
    """An orchestrator and replicas that register with it, as processes without a supervisor."""

    def __init__(self, folder: Path, *, step_s: float, tls: Path | None = None) -> None:
        """Starts the orchestrator. `tls` contains the certificates of each process in a folder with its name."""
        ports = PortPicker()
        self.endpoint, self._admin_endpoint = f"127.0.0.1:{ports.pick()}", f"127.0.0.1:{ports.pick()}"
        self._folder, self._tls = folder, tls
        path = write_pipeline(folder, replicas=1, step_s=step_s)
        self._pipeline = load_pipeline(str(path))
        config = OrchestratorConfig(
            str(path),
            {},
            self.endpoint,
            admin_listen=self._admin_endpoint,
            registration=Registration(),
            tls=self._certificates("orchestrator"),
        )
        self._orchestrator = self._run("stagemesh.orchestrator", config, name="orchestrator")
        self._replicas: dict[str, Popen[bytes]] = {}

    def start(self, name: str) -> None:
        """Starts a replica of the stage with whose name its own name begins."""
        stage = self._pipeline.stages[name.rpartition("-")[0]]
        config = replace(
            stage_config(self._pipeline, stage, replica=name, listen="127.0.0.1:0"),
            orchestrators=(OrchestratorAddress(self._admin_endpoint),),
            tls=self._certificates(name),
            parent_pid=os.getpid(),
        )
        self._replicas[name] = self._run("stagemesh.services.stage", config, name=name)

    def terminate(self, name: str) -> None:
        """Sends SIGTERM to a replica."""
        self._replicas[name].terminate()

    async def restart(self, name: str) -> None:
        """Sends SIGTERM to a replica, and starts it again when it has ended with status 0."""
        self.terminate(name)
        assert await asyncio.to_thread(self._replicas[name].wait, CALL_S) == 0
        self.start(name)

    def end(self) -> None:
        """Terminates all processes. Each replica must exit with status 0."""
        for name in self._replicas:
            self.terminate(name)
        try:
            statuses = {name: process.wait(CALL_S) for name, process in self._replicas.items()}
        finally:
            for process in (self._orchestrator, *self._replicas.values()):
                process.kill()
                process.wait()
        assert not any(statuses.values()), f"replicas ended with {statuses}"

    def _certificates(self, name: str) -> str | None:
        return None if self._tls is None else str(self._tls / name)

    def _run(self, module: str, config: ProcessConfig, *, name: str) -> "Popen[bytes]":
        return Popen(config_command(module, config, self._folder / f"{name}.json"))


@contextmanager
def cluster(folder: Path, *, step_s: float, tls: Path | None = None) -> Iterator[Cluster]:
    started = Cluster(folder, step_s=step_s, tls=tls)
    try:
        yield started
    finally:
        started.end()


@asynccontextmanager
async def load(endpoint: str) -> AsyncIterator[Load]:
    """Keeps a steady load within the block. Every request must bring its exact outputs."""
    work = Work(requests(3, count=8, steps=_STEPS), OUTPUT_OF, units)
    running, stop = Load(endpoint, work), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(running.until(stop, clients=_CLIENTS))
        yield running
        stop.set()
    wrong = {
        name: each.error or each.flaws() for name, each in running.ended.items() if not each.whole() or each.flaws()
    }
    assert not wrong, wrong
    assert len(running.ended) >= _CLIENTS


async def until_ready(client: AsyncClient, *, replicas: int) -> None:
    """Waits until stage `frames` has exactly `count` ready replicas, and every other stage has one."""
    await poll(lambda: _has(client, replicas), until=bool, timeout_s=_READY_S)


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
