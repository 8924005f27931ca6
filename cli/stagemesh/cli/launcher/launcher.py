"""Runs a whole pipeline on this machine: the orchestrator, all stage replicas and a gateway, as child processes."""

import asyncio
import os
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, cast

from stagemesh.cli.launcher.ports import HOST, PortPicker, check_listen
from stagemesh.cli.launcher.probes import (
    ORCHESTRATOR,
    ExternalStages,
    ProcessState,
    ProcessStatus,
    probe_edges,
    probe_health,
    probe_http,
    probe_stage,
)
from stagemesh.cli.launcher.process_configs import JOBS, MEDIA, job_server_config, media_service_config, stage_config
from stagemesh.cli.launcher.run_folder import RunFolder
from stagemesh.cli.launcher.supervisor import ForkServer, Listener, ProcessSpec, RestartPolicy, Supervisor
from stagemesh.common.errors import StagemeshError
from stagemesh.common.plugins.descriptors import EngineDescriptor
from stagemesh.common.plugins.entry_points import load_descriptor
from stagemesh.common.process import settings
from stagemesh.common.process.config import dump_config
from stagemesh.common.process.media_config import MediaServiceConfig
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.common.tasks import end_tasks
from stagemesh.gateway.config import GatewayConfig
from stagemesh.jobs.config import JobServerConfig
from stagemesh.orchestrator.config import OrchestratorConfig, Registration, ReplicaAddress
from stagemesh.pipeline import Pipeline, Stage
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.credentials import PROCESS, Credentials
from stagemesh.v1.orchestrator_pb2 import EdgeDescription

if TYPE_CHECKING:
    from stagemesh.cli.launcher.certificates import Authority

FORK_SERVER = "fork-server"
"""The name of the fork servers' log."""

_POLL_S = 0.1
_LAUNCHER = "launcher"
_GATEWAY = "gateway"
_HOSTS = (HOST, "localhost")
_Config: TypeAlias = OrchestratorConfig | StageConfig | MediaServiceConfig | JobServerConfig | GatewayConfig
_CERTIFICATE_DAYS = 365
"""The validity of the certificates, in days. Each run issues its own and removes them at its end."""


class Launcher:
    """Starts, supervises and stops the processes of one pipeline. Only reports the state of external stages.

    Use `async with launcher.running():` once, in the main thread of the program.

    - `listen` is the address for clients ("host:port"). Port 0 selects a free port.
    - `admin_listen` is the address for operators, in the same form. If it is None, operators use the port that follows
      the port for clients, or any free port if that port is in use.
    - `overrides` are the overrides of the pipeline file with which `pipeline` was loaded. None means no overrides.
    - `listener` is called with a process's new status after each change of the process's state.
    - `authority` issues the certificates of the processes. If it is None, they do not use TLS.
    - With `metrics`, the orchestrator, each replica and the gateway serve metrics to Prometheus (`metrics_endpoints`).
    - `gateway_listen` is the address at which a gateway serves OpenAI's API, in the form of `listen`. If it is None, no
      gateway runs. With an authority, the gateway calls the orchestrator as "client/gateway", for all its HTTP callers.
    - With `jobs`, a job server runs requests as jobs. With an authority, it calls the orchestrator as "client/jobs".
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        listen: str,
        admin_listen: str | None = None,
        overrides: Mapping[str, str] | None = None,
        listener: Listener | None = None,
        authority: "Authority | None" = None,
        metrics: bool = False,
        gateway_listen: str | None = None,
        jobs: bool = False,
    ) -> None:
        self._pipeline = pipeline
        self._overrides = dict(overrides or {})
        self._listener = listener
        self._policy = RestartPolicy()
        self._authority = authority
        self._ports = PortPicker()
        self.endpoint = self._with_port(listen)
        self.admin_endpoint = self._next_to_clients() if admin_listen is None else self._with_port(admin_listen)
        self.gateway_endpoint = None if gateway_listen is None else self._with_port(gateway_listen)
        """The address of the gateway ("host:port"), or None if no gateway runs."""
        self._external = ExternalStages(pipeline, admin_endpoint=self.admin_endpoint)
        self._jobs = (
            job_server_config(pipeline, listen=self._with_port(f"{HOST}:0"), server=self.endpoint) if jobs else None
        )
        self.processes: dict[str, ProcessStatus] = {}
        self._metrics = metrics
        self.metrics_endpoints: dict[str, str] = {}
        """The addresses at which processes serve metrics, by the names of the processes."""
        self._ready = asyncio.Event()

    @property
    def gateway_url(self) -> str:
        """The base URL of OpenAI's API, or "" if no gateway runs."""
        return f"http://{self.gateway_endpoint}/v1" if self.gateway_endpoint else ""

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[Path]:
        """Starts all processes when the block is entered, and stops them when the block is exited.

        Yields the folder with the logs of the processes.

        Raises NotReadyError (PORT_IN_USE) if a port is in use. If a process terminates repeatedly without ever
        becoming ready, cancels the block and raises NotReadyError (START_FAILED).
        """
        check_listen(self.endpoint)
        check_listen(self.admin_endpoint, option="--admin-port")
        if self.gateway_endpoint is not None:
            check_listen(self.gateway_endpoint, option="--gateway")
        folder = RunFolder(settings.runs_dir(), pipeline=self._pipeline.name)
        try:
            PROCESS.use(Credentials(self._certify(folder, _LAUNCHER, "operator", "client")))
            async with (
                self._fork_servers(folder) as fork_servers,
                open_channel(self.endpoint) as channel,
                asyncio.TaskGroup() as group,
            ):
                specs = self._plan_processes(folder, fork_servers)
                starting = [
                    ProcessStatus(each.name, each.stage, each.endpoint, ProcessState.STARTING) for each in specs
                ]
                self.processes = {each.name: each for each in (*starting, *self._external.statuses.values())}
                watching = group.create_task(self._external.watch(channel, self._update))
                tasks = {
                    spec.name: group.create_task(Supervisor(spec, policy=self._policy, listener=self._update).run())
                    for spec in specs
                }
                yield folder.path
                watching.cancel()
                await _stop(tasks)
        except BaseExceptionGroup as group:
            raise _root_cause(group) from group
        finally:
            folder.close()

    async def wait_ready(self) -> tuple[EdgeDescription, ...]:
        """Waits until every process has become ready and every edge has a connector.

        Returns the descriptions of the edges. Raises NotReadyError (CONNECTOR_UNAVAILABLE) if an edge's connector
        cannot work. If a process cannot become ready, this call is cancelled together with the block of `running`.
        """
        async with open_channel(self.endpoint) as channel:
            while True:
                edges = await probe_edges(channel)
                if edges is not None and self._ready.is_set():
                    return edges
                await asyncio.sleep(_POLL_S)

    @asynccontextmanager
    async def _fork_servers(self, folder: RunFolder) -> AsyncGenerator[Mapping[str, ForkServer]]:
        """Runs a fork server for each `preload` of the engines of the stages, by `preload`.

        Engines without `preload` share one, with an empty key: their stages need not wait for the imports of other
        engines. Runs no server on systems other than Linux, which have no descriptors of processes.
        """
        stages = [stage for stage in self._pipeline.stages.values() if not stage.is_external]
        preloads = sorted(set(map(_preload, stages))) if hasattr(os, "pidfd_open") else []
        async with AsyncExitStack() as stack:
            servers = [ForkServer.running(preload, log=folder.log_path(FORK_SERVER)) for preload in preloads]
            running = [await stack.enter_async_context(server) for server in servers]
            yield dict(zip(preloads, running, strict=True))

    def _certify(self, folder: RunFolder, name: str, *roles: str) -> str | None:
        """Issues a certificate to the process `name`, with this name in each of the roles. Returns its folder.

        The role of a replica contains its stage ("stage/thinker"). Without roles, the process can be
        called, but may call no other process. Returns None if the launcher has no authority.
        """
        if self._authority is None:
            return None
        names = [f"{role}/{name}" for role in roles]
        return str(self._authority.issue(folder.certificates_path(name), names, hosts=_HOSTS, days=_CERTIFICATE_DAYS))

    def _plan_processes(self, folder: RunFolder, fork_servers: Mapping[str, ForkServer]) -> tuple[ProcessSpec, ...]:
        """Returns the specifications of all processes: the orchestrator first, the replicas last.

        Selects ports for the replicas, and writes the config files of all processes to `folder`.
        """
        media, stages = self._media_config(), self._pipeline.stages.values()
        addresses = {stage.name: self._addresses(stage) for stage in stages}
        orchestrator = OrchestratorConfig(
            pipeline=str(self._pipeline.source),
            overrides=self._overrides,
            replicas=addresses,
            listen=self.endpoint,
            admin_listen=self.admin_endpoint,
            media_endpoint=media.listen if media else "",
            jobs_endpoint=self._jobs.listen if self._jobs else "",
            registration=Registration() if self._external.register else None,
            metrics_listen=self._metrics_listen(ORCHESTRATOR),
        )
        plan = partial(self._plan, folder)
        specs = [plan(ORCHESTRATOR, "stagemesh.orchestrator", orchestrator, "orchestrator")]
        if media:
            specs.append(plan(MEDIA, "stagemesh.services.media", media))
        if self._jobs:
            specs.append(plan(JOBS, "stagemesh.jobs", self._jobs, "client"))
        if gateway := self._gateway_config():
            spec = plan(_GATEWAY, "stagemesh.gateway", gateway, "client")
            specs.append(replace(spec, probe=probe_http(gateway.listen)))
        for stage in stages:
            for address in addresses[stage.name]:
                config = self._stage_config(stage, address, folder)
                spec = plan(address.name, "stagemesh.services.stage", config, f"stage/{stage.name}")
                server = fork_servers.get(_preload(stage))
                specs.append(replace(spec, stage=stage.name, probe=probe_stage, fork_server=server))
        return tuple(specs)

    def _plan(self, folder: RunFolder, name: str, module: str, config: _Config, *roles: str) -> ProcessSpec:
        """Returns the specification of a process that runs `module` and serves no stage.

        Issues a certificate with the roles to the process, and writes its config file to `folder`.
        """
        complete = replace(config, tls=self._certify(folder, name, *roles), parent_pid=os.getpid())
        file = folder.write_config(name, dump_config(complete))
        # -u disables buffering so that the log of a killed process is complete.
        command = (sys.executable, "-u", "-m", module, "--config", str(file))
        return ProcessSpec(name, "", config.listen, command, folder.log_path(name), probe_health, config=file)

    def _media_config(self) -> MediaServiceConfig | None:
        """Returns the config of the media service, or None if the pipeline has no store."""
        media = self._pipeline.media
        if media is None or not media.store:
            return None
        return media_service_config(self._pipeline, listen=f"{HOST}:{self._ports.pick()}")

    def _gateway_config(self) -> GatewayConfig | None:
        endpoint = self.gateway_endpoint
        if endpoint is None:
            return None
        metrics = self._metrics_listen(_GATEWAY)
        return GatewayConfig(endpoint, [[self.endpoint]], voices=str(settings.voices_dir()), metrics_listen=metrics)

    def _addresses(self, stage: Stage) -> tuple[ReplicaAddress, ...]:
        count = range(0 if stage.is_external else stage.replicas)
        return tuple(ReplicaAddress(f"{stage.name}-{i}", f"{HOST}:{self._ports.pick()}") for i in count)

    def _stage_config(self, stage: Stage, address: ReplicaAddress, folder: RunFolder) -> StageConfig:
        details = stage.error_details is not False
        return replace(
            stage_config(self._pipeline, stage, replica=address.name, listen=address.endpoint),
            metrics_listen=self._metrics_listen(address.name),
            error_details=details,
            log=str(folder.log_path(address.name)) if details else "",
        )

    def _metrics_listen(self, name: str) -> str | None:
        if not self._metrics:
            return None
        endpoint = self.metrics_endpoints[name] = f"{HOST}:{self._ports.pick()}"
        return endpoint

    def _with_port(self, listen: str) -> str:
        host, _, port = listen.rpartition(":")
        return f"{host}:{self._ports.pick()}" if port == "0" else listen

    def _next_to_clients(self) -> str:
        host, _, port = self.endpoint.rpartition(":")
        return f"{host}:{self._ports.pick_after(int(port))}"

    def _update(self, status: ProcessStatus) -> None:
        self.processes[status.name] = status
        if all(process.state is ProcessState.READY for process in self.processes.values()):
            self._ready.set()
        if self._listener is not None:
            self._listener(status)


def _root_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Returns the first StagemeshError in a group of errors, or the first error if none is a StagemeshError."""
    cause: BaseException = group.subgroup(StagemeshError) or group
    while isinstance(cause, BaseExceptionGroup):
        cause = cast("BaseExceptionGroup[BaseException]", cause).exceptions[0]
    return cause


async def _stop(tasks: dict[str, asyncio.Task[None]]) -> None:
    # The orchestrator stops first, because requests that it finishes may have steps that have not started.
    orchestrator = tasks.pop(ORCHESTRATOR)
    await end_tasks([orchestrator])
    for task in tasks.values():
        task.cancel()


def _preload(stage: Stage) -> str:
    return load_descriptor(EngineDescriptor, stage.engine).preload or ""
