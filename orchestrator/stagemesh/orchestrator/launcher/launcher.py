"""Runs a whole pipeline on this machine: the orchestrator and every stage replica as child processes."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import cast

from stagemesh.common import settings
from stagemesh.common.backoff import RestartPolicy
from stagemesh.common.errors import StagemeshError
from stagemesh.orchestrator.launcher.edge_probe import EdgesProbe
from stagemesh.orchestrator.launcher.plan import plan_processes
from stagemesh.orchestrator.launcher.ports import PortPicker, check_listen
from stagemesh.orchestrator.launcher.process_states import ORCHESTRATOR, ProcessState, ProcessStatus
from stagemesh.orchestrator.launcher.run_folder import RunFolder
from stagemesh.orchestrator.launcher.supervisor import ProcessSpec, Supervisor
from stagemesh.orchestrator.spec import Pipeline
from stagemesh.v1.orchestrator_pb2 import EdgeDescription

_POLL_S = 0.1

Listener = Callable[[ProcessStatus], None]


class Launcher:
    """The processes of one pipeline. Use `async with launcher.running():`, once, from the program's main thread.

    `listen` is where clients reach the orchestrator, `admin_listen` where operators do; port 0 takes any that is free.
    Without `admin_listen` it is the port after that of clients, where nobody has it. `overrides` are those that the
    pipeline was loaded with. `listener` hears of every change of a process.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        listen: str,
        admin_listen: str | None = None,
        overrides: Mapping[str, str] | None = None,
        listener: Listener | None = None,
        policy: RestartPolicy | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._overrides = dict(overrides or {})
        self._listener = listener
        self._policy = policy or RestartPolicy()
        self._ports = PortPicker()
        self.endpoint = self._with_port(listen)
        self.admin_endpoint = self._beside() if admin_listen is None else self._with_port(admin_listen)
        self.processes: dict[str, ProcessStatus] = {}
        self.edges: tuple[EdgeDescription, ...] = ()
        """What they use, once it is ready."""
        self._ready = asyncio.Event()

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Starts everything, and stops everything at the end of the body, however that ends.

        Raises NotReadyError when a port is in use or a process never comes up, also out of the running body.
        """
        check_listen(self.endpoint)
        check_listen(self.admin_endpoint, option="--admin-port")
        folder = RunFolder.create(settings.runs_dir())
        try:
            specs = plan_processes(
                self._pipeline,
                folder=folder,
                listen=self.endpoint,
                admin_listen=self.admin_endpoint,
                overrides=self._overrides,
                ports=self._ports,
            )
            self.processes = {
                spec.name: ProcessStatus(spec.name, spec.stage, spec.endpoint, ProcessState.STARTING) for spec in specs
            }
            async with _kept_running(specs, policy=self._policy, report=self._take):
                yield
        except BaseExceptionGroup as group:
            raise _first_cause(group) from group
        finally:
            folder.close()

    async def wait_ready(self) -> None:
        """Returns once every process has been ready and every edge can be crossed.

        Raises NotReadyError (CONNECTOR_UNAVAILABLE) where an edge cannot; what keeps a process from being ready ends
        the body of `running`.
        """
        probe = EdgesProbe(self.endpoint)
        try:
            while True:
                edges = await probe.look()
                if edges is not None and self._ready.is_set():
                    self.edges = edges
                    return
                await asyncio.sleep(_POLL_S)
        finally:
            await probe.close()

    def _with_port(self, listen: str) -> str:
        host, _, port = listen.rpartition(":")
        return f"{host}:{self._ports.pick()}" if port == "0" else listen

    def _beside(self) -> str:
        host, _, port = self.endpoint.rpartition(":")
        return f"{host}:{self._ports.pick_beside(int(port))}"

    def _take(self, status: ProcessStatus) -> None:
        self.processes[status.name] = status
        if all(process.state is ProcessState.READY for process in self.processes.values()):
            self._ready.set()
        if self._listener is not None:
            self._listener(status)


@asynccontextmanager
async def _kept_running(
    specs: tuple[ProcessSpec, ...], *, policy: RestartPolicy, report: Listener
) -> AsyncGenerator[None]:
    async with asyncio.TaskGroup() as group:
        supervised = {
            spec.name: group.create_task(Supervisor(spec, policy=policy, report=report).run()) for spec in specs
        }
        yield
        # The orchestrator before the stages: the requests that it lets finish may have steps still to start.
        orchestrator = supervised.pop(ORCHESTRATOR)
        orchestrator.cancel()
        await asyncio.wait([orchestrator])
        for task in supervised.values():
            task.cancel()


def _first_cause(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error to show: one of ours, where there is one."""
    errors = list(_leaves(group))
    return next((error for error in errors if isinstance(error, StagemeshError)), errors[0])


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(cast("BaseExceptionGroup[BaseException]", error))
        else:
            yield error
