"""A process of a benchmark. It has one object, and runs methods of the object on its own event loop on request."""

import asyncio
import ctypes
import gc
import logging
import multiprocessing
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar

import uvloop

ANSWER_S = 60.0
"""The default time limit of a call."""
_CLONE_FS = 0x200

Result = TypeVar("Result")
P = ParamSpec("P")


@dataclass(frozen=True)
class Place:
    """The namespaces of a process (those of process `namespaces_of`, or ours), its address and added variables."""

    address: str = "127.0.0.1"
    namespaces_of: int | None = None
    environment: Mapping[str, str] = field(default_factory=dict[str, str])


class WorkerError(Exception):
    """A worker failed. The text is the cause."""


class End(ABC):
    """One end of a way, in a separate process. `peers` are pipes to the other ends."""

    def __init__(self, peers: Sequence[Connection], *, place: Place) -> None:
        self.peers = peers
        self.place = place

    async def __aenter__(self) -> Self:
        await self.open()
        # A stage process does the same when it is ready. Collecting these objects would take tens of milliseconds.
        gc.collect()
        gc.freeze()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def open(self) -> None:
        """Connects to the other ends."""

    @abstractmethod
    async def close(self) -> None:
        """Releases all resources."""

    async def cpu_s(self) -> float:
        """Returns the processor time that this process has used."""
        return time.process_time()


Held = TypeVar("Held", bound=End)


class Worker(Generic[Held]):
    """A process that the constructor starts and `close` ends. It also ends with its parent."""

    def __init__(
        self, make: type[Held], peers: Sequence[Connection], place: Place, *, starts_processes: bool = False
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._name = make.__name__
        self._control, theirs = context.Pipe()
        self._process = context.Process(target=_main, args=(make, peers, place, theirs), daemon=not starts_processes)
        with ThreadPoolExecutor(1) as starter:
            starter.submit(_start, self._process, place).result()
        theirs.close()

    def ready(self, *, within_s: float = ANSWER_S) -> None:
        """Returns when the held object is ready. Raises WorkerError if its creation fails."""
        self._answer(within_s)

    def begin(
        self, method: Callable[Concatenate[Held, P], Awaitable[Result]], *args: P.args, **kwargs: P.kwargs
    ) -> "Call[Result]":
        """Starts `method` in the worker. There may be one call at a time."""
        try:
            self._control.send((method.__name__, args, kwargs))
        except OSError as exc:
            raise self._died() from exc
        return Call(self._control, self._answer)

    def call(
        self, method: Callable[Concatenate[Held, P], Awaitable[Result]], *args: P.args, **kwargs: P.kwargs
    ) -> Result:
        """Runs `method` in the worker and returns its result."""
        return self.begin(method, *args, **kwargs).result()

    def close(self) -> None:
        """Ends the process. Closing twice is harmless."""
        self._control.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _died(self) -> WorkerError:
        self._process.join(1)
        return WorkerError(f"{self._name} died with {self._process.exitcode}")

    def _answer(self, within_s: float = ANSWER_S) -> Any:
        try:
            if not self._control.poll(within_s):
                raise WorkerError(f"{self._name} did not answer within {within_s:.0f} s")
            failure, result = self._control.recv()
        except (EOFError, ConnectionError) as exc:
            raise self._died() from exc
        if failure:
            raise WorkerError(f"{self._name}: {failure}")
        return result


@dataclass(frozen=True)
class Call(Generic[Result]):
    """A call that is running in a worker."""

    connection: Connection
    """Becomes readable when there is a result."""
    result: Callable[[], Result]
    """Waits for the result and returns it. Raises WorkerError if the call fails."""


def all_of(calls: Sequence[Call[Result]]) -> list[Result]:
    """Returns the results of concurrent calls. Raises the first failure, which may be why other calls hang."""
    waiting = {call.connection: call for call in calls}
    results: dict[Connection, Result] = {}
    while waiting:
        ready = wait(list(waiting), ANSWER_S) or list(waiting)
        for connection in [connection for connection in waiting if connection in ready]:
            results[connection] = waiting.pop(connection).result()
    return [results[call.connection] for call in calls]


async def receive(connection: Connection) -> Any:
    """Returns the next object from the other side, without blocking the event loop."""
    await readable(connection)
    return connection.recv()


def readable(connection: Connection) -> "asyncio.Future[None]":
    """Returns a future that is done when there is an object to receive. It watches from the call of this function."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[None] = loop.create_future()

    def ready() -> None:
        loop.remove_reader(connection.fileno())
        if not future.done():
            future.set_result(None)

    loop.add_reader(connection.fileno(), ready)
    return future


def _main(make: type[End], peers: Sequence[Connection], place: Place, control: Connection) -> None:
    logging.basicConfig(level=logging.ERROR)
    os.environ.update(place.environment)
    uvloop.run(_serve(make, peers, place, control))


async def _serve(make: type[End], peers: Sequence[Connection], place: Place, control: Connection) -> None:
    try:
        async with make(peers, place=place) as held:
            control.send(("", None))
            while await _next_call(held, control):
                pass
    except Exception as exc:  # noqa: BLE001 - the process's outermost edge: the error is reported to the parent
        control.send((f"{type(exc).__name__}: {exc}", None))


async def _next_call(held: object, control: Connection) -> bool:
    """Runs one method. Returns False if the other side has closed its end."""
    try:
        name, args, kwargs = await receive(control)
    except EOFError:
        return False
    control.send(("", await getattr(held, name)(*args, **kwargs)))
    return True


def _start(process: BaseProcess, place: Place) -> None:
    """Starts a process from the current thread, after that thread has entered the place's namespaces."""
    if place.namespaces_of is not None:
        libc = ctypes.CDLL(None, use_errno=True)
        with ExitStack() as stack:
            paths = (Path(f"/proc/{place.namespaces_of}/ns/{kind}") for kind in ("net", "mnt"))
            spaces = [stack.enter_context(path.open()) for path in paths]
            if libc.unshare(_CLONE_FS) or any(libc.setns(space.fileno(), 0) for space in spaces):
                raise WorkerError(f"cannot enter namespaces: {os.strerror(ctypes.get_errno())}")
    process.start()
