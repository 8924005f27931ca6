"""The processes of a deployment that is upgraded, and clients that keep it busy meanwhile."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.cli.launcher.process_configs import stage_config
from stagemesh.client import AsyncClient, Result
from stagemesh.common.errors import StagemeshError
from stagemesh.common.process.config import ProcessConfig
from stagemesh.conformance import until
from stagemesh.orchestrator.config import OrchestratorConfig, ReplicaAddress
from stagemesh.pipeline import load_pipeline
from stagemesh.rpc.channels import open_channel
from tests.children import config_command
from tests.orchestrator.mesh import until_health

READY_S = 90.0
ORCHESTRATOR_HEALTH = "stagemesh.v1.OrchestratorService"
_CALL_S = 60.0
_CLIENTS = 4


@dataclass(frozen=True)
class Version:
    """One version of a pipeline: its file and the generation of its processes."""

    path: Path
    generation: str
    accepts: str
    """The pattern of the generations that its orchestrators accept."""


@dataclass
class RunningProcess:
    """A process, and the address at which it serves."""

    process: asyncio.subprocess.Process
    endpoint: str
    terminated_s: float = 0.0
    """The time of `terminate`, on the monotonic clock."""

    async def until_serving(self, name: str) -> None:
        """Waits until the health status of a name is SERVING."""
        async with open_channel(self.endpoint) as channel:
            await until_health(channel, serving=True, service=name, timeout_s=READY_S)

    async def terminate(self) -> None:
        """Sends SIGTERM and waits for the end, which must be in order."""
        self.terminated_s = time.monotonic()
        self.process.terminate()
        async with asyncio.timeout(_CALL_S):
            assert await self.process.wait() == 0


@dataclass
class Processes:
    """The processes of all versions. `addresses` are those of every replica that may run, by stage."""

    folder: Path
    addresses: Mapping[str, tuple[ReplicaAddress, ...]]
    running: list[RunningProcess] = field(default_factory=list[RunningProcess])

    async def start_stage(self, version: Version, stage: str, number: int, *, drain_s: float = 20.0) -> RunningProcess:
        """Starts the replica with this number in the stage's addresses."""
        pipeline = load_pipeline(str(version.path))
        address = self.addresses[stage][number]
        config = stage_config(pipeline, pipeline.stages[stage], replica=address.name, listen=address.endpoint)
        config = replace(config, generation=version.generation, drain_s=drain_s, parent_pid=os.getpid())
        return await self._start("stagemesh.services.stage", config, address)

    async def start_orchestrator(self, version: Version, *, drain_s: float = 20.0) -> RunningProcess:
        """Starts an orchestrator."""
        stages = load_pipeline(str(version.path)).stages
        address = ReplicaAddress(f"orchestrator-{len(self.running)}", f"127.0.0.1:{PortPicker().pick()}")
        config = OrchestratorConfig(
            pipeline=str(version.path),
            replicas={stage: addresses for stage, addresses in self.addresses.items() if stage in stages},
            listen=address.endpoint,
            generation=version.generation,
            generations=(version.accepts,),
            drain_s=drain_s,
            parent_pid=os.getpid(),
        )
        return await self._start("stagemesh.orchestrator", config, address)

    async def end(self) -> None:
        """Ends the processes that still run."""
        for each in self.running:
            if each.process.returncode is None:
                each.process.kill()
            await each.process.wait()

    async def _start(self, module: str, config: ProcessConfig, address: ReplicaAddress) -> RunningProcess:
        command = config_command(module, config, self.folder / f"{address.name}.json")
        process = await asyncio.create_subprocess_exec(*command)
        self.running.append(RunningProcess(process, address.endpoint))
        return self.running[-1]


def pick_addresses(*stages: str, count: int = 2) -> Mapping[str, tuple[ReplicaAddress, ...]]:
    """Returns `count` free addresses for each stage."""
    ports = PortPicker()
    return {
        stage: tuple(ReplicaAddress(f"{stage}-{number}", f"127.0.0.1:{ports.pick()}") for number in range(count))
        for stage in stages
    }


@dataclass
class Traffic:
    """The requests of clients that send their next request as soon as the last one has ended."""

    endpoint: str
    steps: int
    results: list[Result] = field(default_factory=list[Result])
    errors: list[StagemeshError] = field(default_factory=list[StagemeshError])

    async def run(self, stopping: asyncio.Event) -> None:
        """Sends requests from one client until `stopping` is set."""
        async with AsyncClient(self.endpoint) as client:
            while not stopping.is_set():
                try:
                    generation = client.generate("a story", max_tokens=self.steps, timeout_s=_CALL_S)
                    self.results.append(await generation.result())
                except StagemeshError as exc:
                    self.errors.append(exc)

    async def until_more(self, count: int) -> None:
        """Waits until `count` further requests have ended."""
        wanted = len(self.results) + count
        await until(lambda: len(self.results) >= wanted or bool(self.errors), timeout_s=READY_S)


@asynccontextmanager
async def traffic(endpoint: str, *, steps: int) -> AsyncIterator[Traffic]:
    """Keeps several clients busy within the block. No request may fail."""
    made, stopping = Traffic(endpoint, steps), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for _ in range(_CLIENTS):
            group.create_task(made.run(stopping))
        try:
            yield made
        finally:
            stopping.set()
    assert not made.errors
