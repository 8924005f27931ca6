"""One container of a pod: its process, its restarts, and the probes that the kubelet would make."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import grpc
import httpx
import psutil

from tests.k8s.manifests import Manifest
from tests.k8s.pods.fields import port_number
from tests.rpc.health_calls import Request, Response, check

FASTER = 5
"""The factor by which the intervals of probes are shorter than in the manifests."""
_FIRST_BACKOFF_S, _MAX_BACKOFF_S = 0.2, 2.0
_CONTAINER = ["unshare", "--pid", "--mount", "--fork", "--kill-child", "sh", "-ec"]
_DIES_WITH_TEST = ["setpriv", "--pdeathsig", "KILL"]

Endpoint = Callable[[int], str]
"""Returns the address at which the test reaches a port of the pod."""


class Report(Protocol):
    """Called with a few words when something changes."""

    def __call__(self, what: str, *, is_failure: bool = False) -> None: ...


class Container:
    """A container. `run` restarts its process whenever the process ends, until `stop` is called."""

    def __init__(
        self, manifest: Manifest, *, enter: Sequence[str], script: str, log: Path, endpoint: Endpoint, report: Report
    ) -> None:
        """Creates a container that runs `script` in the namespaces that the command `enter` enters."""
        self.name = str(manifest["name"])
        self.ready = False
        self.restarts = 0
        self.live_probes = 0
        """The number of liveness probes that have passed."""
        self._manifest, self._endpoint, self._report = manifest, endpoint, report
        self._command, self._log = [*_DIES_WITH_TEST, *enter, *_CONTAINER, script], log
        self._process: asyncio.subprocess.Process | None = None
        self._stop = asyncio.Event()

    async def run(self, *, grace_s: float) -> None:
        """Runs the container until `stop` is called. `grace_s` limits the time that a process may take to end."""
        while not self._stop.is_set():
            await self._run_once(grace_s)
            if not self._stop.is_set():
                self.restarts += 1
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stop.wait(), min(_MAX_BACKOFF_S, _FIRST_BACKOFF_S * self.restarts))

    async def complete(self) -> int:
        """Runs the container once. Returns its exit status."""
        process = await self._start()
        try:
            return await process.wait()
        finally:
            await self._kill(process)

    async def stop(self, *, grace_s: float) -> None:
        """Terminates the process. Kills it, and reports that, if it takes longer than `grace_s`."""
        self._stop.set()
        self._set_ready(ready=False)
        if self._process is not None:
            await self._end(self._process, grace_s)

    async def _run_once(self, grace_s: float) -> None:
        process = self._process = await self._start()
        watching = asyncio.create_task(self._watch(process, grace_s))
        try:
            if self._stop.is_set():
                await self._kill(process)
            status = await process.wait()
        finally:
            self._process = None
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)
            await self._kill(process)
            self._set_ready(ready=False)
        self._report(f"{self.name} ended with {status}", is_failure=status != 0 or not self._stop.is_set())

    async def _start(self) -> asyncio.subprocess.Process:
        with self._log.open("ab") as log:
            return await asyncio.create_subprocess_exec(
                *self._command, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log
            )

    async def _end(self, process: asyncio.subprocess.Process, grace_s: float) -> None:
        _signal(process, signal.SIGTERM)
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except TimeoutError:
            self._report(f"{self.name} killed after {grace_s:g} s", is_failure=True)
            await self._kill(process)

    @staticmethod
    async def _kill(process: asyncio.subprocess.Process) -> None:
        # The container's first process ends with this one.
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _watch(self, process: asyncio.subprocess.Process, grace_s: float) -> None:
        """Probes a process until it ends. Terminates it if the startup or the liveness probe fails too often."""
        startup = self._manifest.get("startupProbe")
        if startup is None or await self._starts(startup):
            readiness = asyncio.create_task(self._follow_readiness())
            try:
                await self._until_dead()
            finally:
                readiness.cancel()
                await asyncio.gather(readiness, return_exceptions=True)
        self._report(f"{self.name} failed its probes", is_failure=True)
        await self._end(process, grace_s)

    async def _starts(self, probe: Manifest) -> bool:
        """Returns whether the startup probe passes before it has failed for as long as the manifest allows."""
        for _ in range(FASTER * int(probe.get("failureThreshold", 3))):
            await _pause(probe)
            if await self._passes(probe):
                self._report(f"{self.name} has started")
                return True
        return False

    async def _until_dead(self) -> None:
        """Waits until the liveness probe has failed for as long as the manifest allows."""
        probe = self._manifest.get("livenessProbe")
        if probe is None:
            await asyncio.Event().wait()
            return
        failures = 0
        while failures < FASTER * int(probe.get("failureThreshold", 3)):
            await _pause(probe)
            alive = await self._passes(probe)
            self.live_probes += alive
            failures = 0 if alive else failures + 1

    async def _follow_readiness(self) -> None:
        probe = self._manifest.get("readinessProbe")
        if probe is None:
            self._set_ready(ready=True)
            return
        failures = 0
        while True:
            failures = 0 if await self._passes(probe) else failures + 1
            if failures == 0:
                self._set_ready(ready=True)
            elif failures >= int(probe.get("failureThreshold", 3)):
                self._set_ready(ready=False)
            await _pause(probe)

    async def _passes(self, probe: Manifest) -> bool:
        timeout_s = float(probe.get("timeoutSeconds", 1))
        if "httpGet" in probe:
            get = probe["httpGet"]
            endpoint = self._endpoint(port_number([self._manifest], get["port"]))
            return await answers(f"{get['scheme'].lower()}://{endpoint}{get['path']}", timeout_s=timeout_s)
        port, service = int(probe["grpc"]["port"]), str(probe["grpc"].get("service", ""))
        return await serves(self._endpoint(port), service, timeout_s=timeout_s)

    def _set_ready(self, *, ready: bool) -> None:
        if ready != self.ready and not (ready and self._stop.is_set()):
            self.ready = ready
            self._report(f"{self.name} is {'ready' if ready else 'not ready'}")


async def serves(endpoint: str, service: str, *, timeout_s: float) -> bool:
    """Returns whether a server reports, within the time, that a service is SERVING."""
    async with grpc.aio.insecure_channel(endpoint, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        try:
            answer = await check(channel)(Request(service=service), timeout=timeout_s)
        except grpc.aio.AioRpcError:
            return False
        return bool(answer.status == Response.SERVING)


async def answers(url: str, *, timeout_s: float) -> bool:
    """Returns whether a server answers a GET within the time, without an error. It may have any certificate."""
    try:
        # An asynchronous client would leave connections that end only with the server.
        answer = await asyncio.to_thread(httpx.get, url, verify=False, timeout=timeout_s)
    except httpx.TransportError:
        return False
    return answer.is_success


async def _pause(probe: Manifest) -> None:
    await asyncio.sleep(float(probe.get("periodSeconds", 10)) / FASTER)


def _signal(process: asyncio.subprocess.Process, number: signal.Signals) -> None:
    """Sends a signal to the first process of a container, whose parent is `process`."""
    with suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children():
            child.send_signal(number)
