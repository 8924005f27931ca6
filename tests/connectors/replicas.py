"""Replica processes that a test starts, controls and kills."""

import asyncio
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

import psutil

_Streams: TypeAlias = tuple[asyncio.StreamReader, asyncio.StreamWriter]

START_TIMEOUT_S = 30.0
_ROOT = Path(__file__).parents[2]


class ReplicaError(Exception):
    """The error of a command of a replica process."""

    def __init__(self, *, kind: str, reason: str, message: str) -> None:
        super().__init__(f"{kind} {reason}: {message}")
        self.kind, self.reason, self.message = kind, reason, message


class Replica:
    """One running replica process."""

    def __init__(self, name: str, *, process: "subprocess.Popen[bytes]", control: _Streams) -> None:
        self.name = name
        self.endpoint = ""
        self._process = process
        self._reader, self._writer = control
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {0: asyncio.get_running_loop().create_future()}
        self._task = asyncio.create_task(self._read(), name=f"answers of {name}")

    async def started(self) -> None:
        """Returns when the process serves."""
        async with asyncio.timeout(START_TIMEOUT_S):
            self.endpoint = (await self._answers[0])["endpoint"]

    async def call(self, op: str, **arguments: Any) -> Any:
        """Runs a command. Raises ReplicaError if it fails, and ConnectionError if the process has terminated."""
        number = next(self._ids)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        if self._task.done():
            raise ConnectionError(f"{self.name} is gone")
        self._writer.write(json.dumps({"id": number, "op": op, **arguments}).encode() + b"\n")
        return await answer

    def start(self, op: str, **arguments: Any) -> "asyncio.Task[Any]":
        """Starts a command in a task."""
        return asyncio.create_task(self.call(op, **arguments), name=f"{op} of {self.name}")

    async def wait(
        self, op: str, condition: Callable[[Any], bool], *, timeout_s: float = 30.0, **arguments: Any
    ) -> Any:
        """Repeats a command until its result meets a condition."""
        deadline = time.monotonic() + timeout_s
        while not condition(result := await self.call(op, **arguments)):
            assert time.monotonic() < deadline, f"{self.name}: not so after {timeout_s} s: {result}"
            await asyncio.sleep(0.01)
        return result

    @property
    def process_id(self) -> int:
        """The process id of the replica itself, not of a command that started it."""
        children = psutil.Process(self._process.pid).children(recursive=True)
        return children[-1].pid if children else self._process.pid

    def signal(self, number: int) -> None:
        """Sends a signal to the replica itself."""
        psutil.Process(self.process_id).send_signal(number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.signal(signal.SIGKILL)

    async def close(self) -> None:
        """Ends the process and waits for it."""
        self._writer.close()
        try:
            await asyncio.to_thread(self._process.wait, 10)
        except subprocess.TimeoutExpired:
            self.kill()
            self._process.wait(5)
        await self._task

    async def _read(self) -> None:
        try:
            # A killed process resets the connection.
            with suppress(ConnectionError):
                while line := await self._reader.readline():
                    self._take(json.loads(line))
        finally:
            for answer in self._answers.values():
                if not answer.done():
                    answer.set_exception(ConnectionError(f"{self.name} is gone"))
                    answer.exception()

    def _take(self, message: Mapping[str, Any]) -> None:
        answer = self._answers.pop(message["id"])
        if answer.done():
            return
        if error := message.get("error"):
            answer.set_exception(ReplicaError(**error))
        else:
            answer.set_result(message["result"])


def _spawn(
    command: Sequence[str], *, control: socket.socket, environment: Mapping[str, str]
) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [*command, "--control-fd", str(control.fileno())],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path), **environment},
        pass_fds=[control.fileno()],
    )


@asynccontextmanager
async def replica(
    name: str,
    *,
    module: str = "tests.connectors.replica_process",
    within: Sequence[str] = (),
    listen: str = "127.0.0.1:0",
    environment: Mapping[str, str] | None = None,
    limits: Mapping[str, int | str] | None = None,
) -> AsyncIterator[Replica]:
    """Starts a replica process. `module` is its program.

    `within` is a command that runs another command elsewhere, as in a namespace.
    """
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", module, "--replica", name, "--listen", listen]
    command += ["--limits", json.dumps(limits or {})]
    with theirs:
        process = _spawn([*within, *command], control=theirs, environment=environment or {})
    one = Replica(name, process=process, control=await asyncio.open_connection(sock=ours))
    try:
        await one.started()
        yield one
    finally:
        await one.close()


async def flow(
    producer: Replica,
    consumer: Replica,
    *,
    request: str,
    connector: str,
    count: int,
    size_bytes: int,
    gated: bool = False,
) -> "tuple[asyncio.Task[Any], asyncio.Task[Any]]":
    """Starts a flow; returns the tasks of its sender and its receiver."""
    await consumer.call("expect", request=request, producer=producer.name, gated=gated)
    receiver = consumer.start("receive", request=request, size_bytes=size_bytes)
    sender = producer.start(
        "send",
        request=request,
        endpoint=consumer.endpoint,
        consumer=consumer.name,
        connector=connector,
        count=count,
        size_bytes=size_bytes,
    )
    return sender, receiver
