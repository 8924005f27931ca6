"""Wires and a clock for models of the data plane: a test decides when messages move and when time passes."""

import asyncio
import os
import socket
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.stream import connection, producer_link
from stagemesh.connectors.stream.local_socket import LocalProducer
from stagemesh.rpc.message_streams import StreamHandler
from stagemesh.v1 import stage_pb2
from tests.connectors.relay_faults import Direction, split

_SETTLING_TURNS = 15


class Clock(asyncio.SelectorEventLoop):
    """A loop whose time changes only when a test advances it."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s


class WireEnd:
    """The message stream of one end."""

    is_writable = True

    def __init__(self, wire: "Wire", direction: Direction) -> None:
        self._wire, self._direction = wire, direction

    def write(self, data: bytes) -> None:
        self._wire.queues[self._direction].extend(split(data, self._direction))

    def close(self, error: StagemeshError | None = None) -> None:
        self._wire.over.set()
        # The producer's end may have been cancelled before it runs.
        asyncio.get_running_loop().call_soon(self._wire.end)

    async def run(self) -> None:
        """Runs until the wire is cut, as `ClientStream.run` does."""
        await self._wire.over.wait()
        self._wire.end()


class Wire:
    """One connection from a producer to a consumer. The producer is on the consumer's host if it passes `arena_fd`."""

    def __init__(self, consumer: DataPlane, user: StreamHandler, *, arena_fd: int | None = None) -> None:
        self.queues: dict[Direction, deque[bytes]] = {direction: deque() for direction in Direction}
        self.over = asyncio.Event()
        self._user = user
        self._local: socket.socket | None = None
        if arena_fd is not None:
            self._local, other = socket.socketpair()
            other.close()
        local = LocalProducer(self._local, os.dup(arena_fd)) if self._local and arena_fd is not None else None
        self._session = consumer._open_session(local=local)
        self._session.begin(WireEnd(self, Direction.REPLIES))
        self._has_ended = False

    def deliver(self, direction: Direction) -> None:
        """Delivers the next message. Raises the error with which its receiver rejects it."""
        message = self.queues[direction].popleft()
        if direction is Direction.REQUESTS:
            self._session.received(message)
            return
        response = stage_pb2.PutChunkResponse.FromString(message)
        if response.HasField("welcome"):
            response.welcome.local_socket = ""
        self._user.received(response.SerializeToString())

    def end(self) -> None:
        """Closes both ends. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            for queue in self.queues.values():
                queue.clear()
            self._session.closed(None)
            if self._local is not None:
                self._local.close()
            self._user.closed(UnavailableError("cut"))


def use_wires(patches: pytest.MonkeyPatch, stream: Callable[..., Any]) -> None:
    """Lets producers connect by `stream`, which receives the consumer's endpoint, the handler and the peer's name."""
    patches.setattr(connection, "ClientStream", stream)
    patches.setattr(connection, "open_channel", _channel)
    patches.setattr(producer_link.ProducerLink, "_is_gone", _is_never_gone)


async def turns() -> None:
    """Lets the tasks of the loop run until they wait for a message or for time."""
    for _ in range(_SETTLING_TURNS):
        await asyncio.sleep(0)


async def close_all(planes: Iterable[DataPlane]) -> None:
    """Closes the data planes, and ends all other tasks."""
    for plane in planes:
        await plane.close()
    left = asyncio.all_tasks() - {asyncio.current_task()}
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def model_settings(*, examples: int, steps: int) -> settings:
    """Returns the settings of a model's test."""
    return settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        # Shrinking a failing example takes longer than the timeout of a test.
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


@asynccontextmanager
async def _channel(endpoint: str, **_: object) -> AsyncIterator[str]:
    yield endpoint


async def _is_never_gone(_: object) -> bool:
    return False
