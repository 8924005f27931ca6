"""The replica's side of rows that a vLLM worker emits: receives the rows and emits them for their requests.

A worker writes the rows of all requests of a step into the replica's arena (`row_writer`), and reports them on a Unix
socket.
"""

import asyncio
import logging
import secrets
import socket
import sys
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.common.notification import Notifier
from stagemesh.common.wire.tensors import Tensors
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.arena.worker_writer import PartitionAddress
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Emission
from stagemesh.services.engines.vllm.engine_core import runner_call
from stagemesh.services.engines.vllm.features import EngineRequest, RequestHook, set_argument
from stagemesh.services.engines.vllm.rows import row_writer

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

_MAX_MESSAGE_BYTES = 1 << 20
_CONNECT_S = 10.0
_LATE_S = 10.0
"""The maximum time to wait for the rows of tokens that vLLM has already sampled, in seconds."""

_log = logging.getLogger(__name__)


class RowsLostError(UnavailableError):
    """Raised if a worker does not write rows that a request emits."""

    default_reason = "HIDDEN_STATES_LOST"


class EmittedRows(RequestHook):
    """Buffers and emits the rows of one request. A row belongs to one token position.

    Emits each row once and in order, even if the worker writes some rows again after a preemption.
    """

    def __init__(self, request: EngineRequest, *, first_position: int, end_position: int | None = None) -> None:
        """`end_position` is the position after the last requested row, or None if all later rows are requested."""
        self.end_position = end_position
        self.next_position = first_position
        """The token position of the next row to arrive. All requested rows before this position have arrived."""
        self.request = request
        self._ready: deque[tuple[int, Tensors]] = deque()
        self._error: StagemeshError | None = None
        self._changed = Notifier()

    def push(self, position: int, tensors: Tensors) -> None:
        """Adds consecutive rows that start at token position `position`. Drops rows that have already been added.

        Rows can arrive again after a preemption. If rows before `position` are missing, records an error with `fail`.
        """
        count = _count(tensors)
        skipped = self.next_position - position
        if skipped >= count:
            return
        if skipped < 0:
            self.fail(RowsLostError(f"the rows of positions {self.next_position} to {position} are missing"))
            return
        if skipped:
            tensors = {name: tensor[skipped:] for name, tensor in tensors.items()}
        self._ready.append((self.next_position, tensors))
        self.next_position = position + count
        self._changed.fire()

    def fail(self, error: StagemeshError) -> None:
        """Records an error, which later calls of `take` raise. Does nothing if an error is already recorded."""
        self._error = self._error or error
        self._changed.fire()

    def observe(self, *, finished: bool) -> Iterator[Emission]:  # noqa: ARG002  # `finish` emits the rest
        yield from self.take(before=self.request.computed_tokens)
        # Reached after the consumer has received the rows, so that a slow consumer delays only its own request.
        self.request.limit.set_taken(self.request.known_tokens)

    def take(self, *, before: int) -> list[Emission]:
        """Removes the buffered rows of the token positions below `before`, and returns them as emissions.

        If `fail` has recorded an error, raises this error.
        """
        if self._error is not None:
            raise self._error
        taken: list[Emission] = []
        while self._ready and self._ready[0][0] < before:
            position, tensors = self._ready.popleft()
            count = before - position
            if _count(tensors) > count:
                self._ready.appendleft((before, {name: tensor[count:] for name, tensor in tensors.items()}))
                tensors = {name: tensor[:count] for name, tensor in tensors.items()}
            metadata = {"token_start": position, "prompt_tokens": len(self.request.prompt.token_ids)}
            taken.append(Emission(Packet(tensors, metadata)))
        return taken

    async def finish(self) -> AsyncGenerator[Emission]:
        """Yields the remaining rows as they arrive. Called after the request's last output.

        Raises UnavailableError if no row arrives for `_LATE_S` seconds. If `fail` has recorded an error, raises this
        error.
        """
        position = min(self.request.computed_tokens, self.end_position or sys.maxsize)
        while True:
            if emissions := self.take(before=position):
                for emission in emissions:
                    yield emission
                # More rows may have arrived while the consumer processed these rows.
                continue
            if self.next_position >= position:
                return
            try:
                async with asyncio.timeout(_LATE_S):
                    await self._changed.wait()
            except TimeoutError:
                raise RowsLostError(
                    f"the rows from position {self.next_position} on did not arrive; the worker's log has the cause"
                ) from None


class RowReceiver:
    """Receives the rows that a vLLM worker emits, and adds them to their requests.

    All methods must be called on the event loop's thread.
    """

    def __init__(self, arena: Arena | None, *, share_bytes: int) -> None:
        """`share_bytes` is the total size of the worker's partitions of the arena, in bytes."""
        self._arena, self._share_bytes = arena, share_bytes
        self._tickets: list[PartitionAddress] = []
        self._requests: dict[str, EmittedRows] = {}
        self._connection: socket.socket | None = None

    async def connect(
        self, llm: "AsyncLLM", tensors: Mapping[str, str], *, check: Callable[[Any], None] = lambda _: None
    ) -> None:
        """Reserves the worker's partitions of the arena, and waits until the worker that writes rows has connected.

        `tensors` contains the dtypes of the emitted tensors, by tensor name. `check` is called with each result of the
        model runners' method `attach_replica`, and raises an error if the worker will not connect.

        Raises NotReadyError if the arena has too little space, UnavailableError if no worker connects, and
        CoreRefusalError if a worker cannot open the arena.
        """
        assert self._arena is not None, "a stage's runtime passes the arena before it starts the engine"
        overflow_bytes = self._share_bytes // row_writer.OVERFLOW_DIVISOR
        for size_bytes in (self._share_bytes - overflow_bytes, overflow_bytes):
            self._tickets.append(self._arena.open_partition(size_bytes))
        rows, overflow = self._tickets
        address, token = f"stagemesh-rows-{secrets.token_hex(16)}", secrets.token_bytes(16)
        attachment = row_writer.Attachment(address, token, rows, overflow, dict(tensors))
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as listener:
            listener.bind("\0" + address)
            listener.listen(4)
            try:
                async with asyncio.timeout(_CONNECT_S):
                    for result in await runner_call(llm, "attach_replica", msgspec.msgpack.encode(attachment)):
                        check(result)
                    self._connection = await _accept(listener, token)
            except TimeoutError:
                raise RowsLostError("no vLLM worker connected to write rows; the worker's log has the cause") from None
        asyncio.get_running_loop().add_reader(self._connection, self._read_messages, self._arena)

    def open(self, rows: EmittedRows, held: AsyncExitStack) -> None:
        """Starts to receive the rows of a request, from the next position of `rows` onwards."""
        request = rows.request
        set_argument(request.params, row_writer.RequestedRows(request.name, rows.next_position, rows.end_position))
        self._requests[request.name] = rows
        held.callback(self._requests.pop, request.name)
        request.limit.set_taken(request.known_tokens)

    def close(self) -> None:
        """Closes the connection and frees the partitions of the arena. May be called more than once."""
        if self._connection is not None:
            asyncio.get_running_loop().remove_reader(self._connection)
            self._connection.close()
            self._connection = None
        while self._arena is not None and self._tickets:
            self._arena.close_partition(self._tickets.pop())

    # -- internals

    def _read_messages(self, arena: Arena) -> None:
        """Reads all available messages from the worker, and adds the reported rows to their requests.

        Fails all requests if the worker has closed the connection or if a message is invalid.
        """
        assert self._connection is not None, "a closed connection has no reader"
        try:
            while data := self._connection.recv(_MAX_MESSAGE_BYTES):
                self._push(msgspec.msgpack.decode(data, type=row_writer.StepRows), arena)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError, StagemeshError) as exc:
            _log.error("cannot read the worker's message about rows: %s", exc)
        # The worker has closed the connection or has violated the protocol.
        asyncio.get_running_loop().remove_reader(self._connection)
        for rows in self._requests.values():
            rows.fail(RowsLostError("vLLM's worker has stopped writing rows; the worker's log has the cause"))

    def _push(self, step: row_writer.StepRows, arena: Arena) -> None:
        tensors = arena.adopt(step.handle).held()
        if step.overflow:
            tensors = {name: np.array(tensor) for name, tensor in tensors.items()}
        for part in step.requests:
            rows = self._requests.get(part.name)
            if rows is not None and part.rows:
                end = part.start + part.rows
                rows.push(part.position, {name: tensor[part.start : end] for name, tensor in tensors.items()})


async def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """Waits for a connection that sends the token, and returns this connection. Closes all other connections."""
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(listener)
        connection.setblocking(False)
        if secrets.compare_digest(await loop.sock_recv(connection, 64), token):
            return connection
        connection.close()


def _count(tensors: Tensors) -> int:
    return len(next(iter(tensors.values())))
