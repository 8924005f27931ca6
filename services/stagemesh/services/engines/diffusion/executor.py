"""Executors, which run a worker outside the event loop: on a thread of this process, or in several processes.

The worker processes are called ranks. They compute one model together. The stage process and each rank exchange pickled
messages over a `multiprocessing.connection.Connection`. Pickling is safe here, because both processes run this
project's code and no other process can access the socket pair.
"""

import asyncio
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stagemesh.common.errors import StagemeshError, UnavailableError, needs_extra
from stagemesh.common.process.settings import COMPUTE_VARIABLES, variables
from stagemesh.services.engines.controls import run_to_completion
from stagemesh.services.engines.diffusion.options import DiffusionOptions

if TYPE_CHECKING:
    from stagemesh.services.engines.diffusion.worker import DiffusionWorker

_MODULE = "stagemesh.services.engines.diffusion.rank_main"
_AGREE_S = 10.0
"""Time limit in seconds for the replies of the other ranks after one rank has reported a failure. Without the limit,
ranks could spend minutes waiting for the failed rank."""
_ENVIRONMENT = {
    **COMPUTE_VARIABLES,
    # All ranks run on this host.
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
}


NextCall: TypeAlias = Callable[[], tuple[Any, ...] | None]
"""A function that returns the arguments of the next call, or None if there is none."""


class ThreadExecutor:
    """Runs one worker on a single thread of this process. Executes calls one at a time, in the order in which they were
    submitted.
    """

    def __init__(self, folder: Path, options: DiffusionOptions) -> None:
        self._folder, self._options = folder, options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diffusion")
        self._worker: Any = None
        self._calls = 0
        """The number of calls that run or wait, without those of `repeat`."""

    async def start(self, report: Callable[[str], None]) -> None:
        """Creates the worker. Before each phase of the startup, calls `report` with a description of the phase."""
        report("importing diffusers")
        worker_class = await self._run(import_worker)
        self._worker = await self._run(partial(worker_class, self._folder, self._options))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the worker or of one of its parts. `method` is the method's path from the worker, such as
        "runner.decode".

        Returns the method's result or raises its error. Raises UnavailableError if the executor is closed.
        """
        # `close` may reset the attribute before the thread runs the call.
        worker = self._open_worker()
        self._calls += 1
        try:
            return await self._run(lambda: attrgetter(method)(worker)(*args, **kwargs))
        finally:
            self._calls -= 1

    async def repeat(self, method: str, next_call: NextCall, record: Callable[[Any], None]) -> None:
        """Calls a method of the worker until `next_call` returns None, or until another call waits.

        `next_call` returns the arguments of each call, and `record` is called with its result. Both run on the worker's
        thread. Raises the method's error, or UnavailableError if the executor is closed.
        """
        worker = self._open_worker()

        def work() -> None:
            called = attrgetter(method)(worker)
            while not self._calls and (arguments := next_call()) is not None:
                record(called(*arguments))

        await self._run(work)

    async def wait_failed(self) -> str:
        """Never returns, because the worker's thread ends only with this process."""
        await asyncio.Event().wait()
        raise AssertionError("the event is never set")

    async def close(self) -> None:
        """Shuts the worker down. May be called more than once."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await self._run(worker.shutdown)
        self._thread.shutdown(wait=False)

    # -- inner workings

    def _open_worker(self) -> Any:
        if self._worker is None:
            raise UnavailableError("the engine is closed", reason="SHUTTING_DOWN")
        return self._worker

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


@dataclass(frozen=True)
class RankSetup:
    """The first message to a rank. The rank creates its worker with this content and then replies."""

    folder: Path
    options: DiffusionOptions
    rank: int
    store: Path
    """Path of the file through which the ranks connect to each other. The file must not exist yet."""


@dataclass(frozen=True)
class RankCall:
    """A request to a rank to call a method of its `DiffusionWorker`, or of a part of the worker such as `runner`."""

    method: str
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict[str, Any])


@dataclass(frozen=True)
class RankReply:
    """A rank's reply to a `RankSetup` or a `RankCall`."""

    value: Any = None
    """Return value of the method on rank 0. None on other ranks."""
    error: StagemeshError | None = None
    failures: tuple[str | None, ...] = ()
    """The reasons of the errors of this call. Compared between ranks, because all ranks must have the same outcome.

    If the call raised an error, contains the reason of that error. If the method returned a list of errors, contains
    one item for each request: the error's reason, or None if the request succeeded. Otherwise empty."""


class ProcessExecutor:
    """Runs each call on all ranks in the same order, so that the ranks reach their collective operations together.

    Returns rank 0's result of each call. Kills all ranks if a rank terminates, or if a call fails on only some of
    the ranks.
    """

    def __init__(self, folder: Path, options: DiffusionOptions) -> None:
        self._folder, self._options = folder, options
        self._ranks: list[RankProcess] = []
        self._watchers: list[asyncio.Task[None]] = []
        self._calling = asyncio.Lock()
        self._calls = 0
        """The number of calls that run or wait, without those of `repeat`."""
        self._failure = ""
        self._failed = asyncio.Event()
        self._store_folder: Path | None = None

    async def start(self, report: Callable[[str], None]) -> None:
        count = self._options.parallel.ranks
        report(f"importing diffusers in {count} processes")
        self._store_folder = await asyncio.to_thread(lambda: Path(tempfile.mkdtemp(prefix="stagemesh-ranks-")))
        setups = [RankSetup(self._folder, self._options, rank, self._store_folder / "store") for rank in range(count)]
        for setup in setups:
            self._ranks.append(await start_rank(f"rank {setup.rank} of {count}"))
        self._watchers = [asyncio.create_task(self._watch(rank), name="diffusion rank") for rank in self._ranks]
        async with self._calling:
            await run_to_completion(self._send_all(setups))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        self._calls += 1
        try:
            async with self._calling:
                return await self._call_all(RankCall(method, args, kwargs))
        finally:
            self._calls -= 1

    async def repeat(self, method: str, next_call: NextCall, record: Callable[[Any], None]) -> None:
        """Does the same as `ThreadExecutor.repeat`. The functions run on the event loop."""
        while True:
            # Calls that wait for the lock are next.
            async with self._calling:
                if self._calls or (arguments := next_call()) is None:
                    return
                record(await self._call_all(RankCall(method, arguments)))

    async def wait_failed(self) -> str:
        await self._failed.wait()
        return self._failure

    async def close(self) -> None:
        self._fail("the worker processes are closed")
        ranks, self._ranks = self._ranks, []
        await asyncio.gather(*(rank.close() for rank in ranks))
        await asyncio.gather(*self._watchers)
        folder, self._store_folder = self._store_folder, None
        if folder is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    # -- inner workings

    async def _call_all(self, call: RankCall) -> Any:
        return await run_to_completion(self._send_all([call] * len(self._ranks)))

    async def _send_all(self, messages: Sequence[RankSetup | RankCall]) -> Any:
        if self._failed.is_set():
            raise UnavailableError(self._failure, reason="ENGINE_FAILED")
        requests = [
            asyncio.ensure_future(rank.request(message)) for rank, message in zip(self._ranks, messages, strict=True)
        ]
        try:
            first = await self._agreed_reply(requests)
        except UnavailableError as exc:
            self._fail(exc.message)
            raise UnavailableError(self._failure, reason="ENGINE_FAILED") from exc
        finally:
            # Pending requests end at once, because their ranks have been killed.
            await asyncio.gather(*requests, return_exceptions=True)
        if first.error is not None:
            raise first.error
        return first.value

    async def _agreed_reply(self, requests: Sequence["asyncio.Future[RankReply]"]) -> RankReply:
        """Waits for the replies of all ranks to one call, and returns rank 0's reply.

        `requests` contains the pending reply of each rank, in the order of the ranks. Raises UnavailableError if a rank
        has terminated, or if the ranks report different failures.
        """
        waiting, limit_s = set(requests), None
        while waiting:
            done, waiting = await asyncio.wait(waiting, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise UnavailableError(
                    f"the ranks disagree: one has failed ({_summary(requests)}) but others are still computing",
                    reason="ENGINE_FAILED",
                )
            if any(any(each.result().failures) for each in done):
                limit_s = _AGREE_S
        replies = [each.result() for each in requests]
        if len({reply.failures for reply in replies}) > 1:
            raise UnavailableError(
                f"the ranks disagree: a call ended differently on each ({_summary(requests)})", reason="ENGINE_FAILED"
            )
        return replies[0]

    async def _watch(self, rank: "RankProcess") -> None:
        self._fail(await rank.wait_ended())

    def _fail(self, cause: str) -> None:
        """Kills all ranks. Records only the first `cause`, because one failed rank causes the other ranks to fail."""
        if not self._failed.is_set():
            self._failure = cause
            self._failed.set()
        for rank in self._ranks:
            rank.kill()


class RankProcess:
    """The stage process's connection to one rank process. Created by `start_rank`."""

    def __init__(
        self, name: str, process: asyncio.subprocess.Process, connection: "Connection[Any, RankReply]"
    ) -> None:
        self._name, self._process, self._connection = name, process, connection
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)
        """The thread that exchanges messages with the rank. A thread is needed because the connection's methods
        block."""

    async def request(self, message: RankSetup | RankCall) -> RankReply:
        """Sends a message to the rank, then waits for the rank's reply and returns it.

        Raises UnavailableError with the exit status if the rank has terminated.
        """
        try:
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._exchange, message)
        except (EOFError, OSError) as exc:
            raise UnavailableError(await self.wait_ended(), reason="ENGINE_FAILED") from exc

    async def wait_ended(self) -> str:
        """Waits until the rank process has terminated. Returns the exit status in a sentence for operators."""
        status = await self._process.wait()
        cause = f" ({signal.Signals(-status).name})" if status < 0 else ""
        return f"{self._name} has ended with exit status {status}{cause}; its own log says why"

    def kill(self) -> None:
        """Kills the rank process. Does nothing if the process has already terminated."""
        with suppress(ProcessLookupError):
            self._process.kill()

    async def close(self) -> None:
        """Kills the rank process and closes the connection. The process has no state to save."""
        self.kill()
        await self._process.wait()
        self._thread.shutdown()
        self._connection.close()

    def _exchange(self, message: RankSetup | RankCall) -> RankReply:
        self._connection.send(message)
        return self._connection.recv()


async def start_rank(name: str) -> RankProcess:
    """Starts a rank process. `name` is the process's name in error messages.

    The first message to the process must be a `RankSetup`.
    """
    connection, child_connection = Pipe()
    with child_connection:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            _MODULE,
            str(child_connection.fileno()),
            str(os.getpid()),
            stdin=asyncio.subprocess.DEVNULL,
            pass_fds=(child_connection.fileno(),),
            env=_ENVIRONMENT | variables(),
        )
    return RankProcess(name, process, connection)


def _summary(requests: Sequence["asyncio.Future[RankReply]"]) -> str:
    parts: list[str] = []
    for rank, each in enumerate(requests):
        if each.done():
            error = each.result().error
            parts.append(f"rank {rank}: {error.message if error is not None else each.result().failures or 'done'}")
    return "; ".join(parts)


Executor: TypeAlias = ThreadExecutor | ProcessExecutor
"""An executor, which runs a `DiffusionWorker` outside the event loop. Both kinds of executor have the same methods."""


def make_executor(folder: Path, options: DiffusionOptions) -> Executor:
    """Returns a `ThreadExecutor` if `options.parallel` specifies a single process, otherwise a `ProcessExecutor`."""
    return (ThreadExecutor if options.parallel.ranks == 1 else ProcessExecutor)(folder, options)


def import_worker() -> "type[DiffusionWorker]":
    """Imports the class `DiffusionWorker` and returns it. Raises NotReadyError (MISSING_MODULE) if a module that it
    requires is not installed.
    """
    with needs_extra("diffusion", of="the diffusion engine"):
        from stagemesh.services.engines.diffusion.worker import DiffusionWorker
    return DiffusionWorker
