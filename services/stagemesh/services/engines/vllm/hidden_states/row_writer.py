"""Writes hidden states from a worker's process into the replica's arena, and reports the rows to the replica.

The messages of this module connect a worker to its replica and report written rows.
"""

import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch

from stagemesh.connectors.arena.memory_file import ALIGNMENT_BYTES
from stagemesh.connectors.arena.worker_writer import ArenaWriter, Handle, PartitionTicket, Reserved, without_content

CONFIG_KEY = "stagemesh_layers"
"""The key of vLLM's `additional_config` under which the numbers of the emitted inner layers are listed."""
OVERFLOW_DIVISOR = 4
"""The ratio of the worker's total memory in the arena to its overflow memory.

The replica copies rows out of the overflow memory immediately, so that unread rows do not block other rows.
"""
_WRITES_IN_OVERFLOW = 2
"""The number of writes of maximum size that fit into the overflow memory.

With two, the worker can write while the replica copies.
"""
_SEND_TIMEOUT_S = 60.0
_MAX_STAGED_BYTES = 256 << 20
"""The maximum size of the staged rows, in bytes. Staged rows wait in the worker's memory for space in the arena.

If more bytes are staged, the worker's main thread waits, too.
"""


def max_rows(overflow_bytes: int, *, row_bytes: int, tensors: int) -> int:
    """Returns the maximum number of rows in one write.

    `row_bytes` is the total size of one row in all tensors. `tensors` is the number of tensors.
    """
    return (overflow_bytes // _WRITES_IN_OVERFLOW - tensors * ALIGNMENT_BYTES) // row_bytes


def min_overflow_bytes(*, row_bytes: int, tensors: int) -> int:
    """Returns the minimum size of the overflow memory in bytes, which suffices for writes of one row each.

    `row_bytes` is the total size of one row in all tensors. `tensors` is the number of tensors.
    """
    return _WRITES_IN_OVERFLOW * (row_bytes + tensors * ALIGNMENT_BYTES)


@dataclass(frozen=True)
class Attachment:
    """The data that a worker needs to connect to its replica and to write into the replica's arena."""

    address: str
    """The name of the abstract Unix socket for messages to the replica.

    The first message is `token`. Each further message is a `StepRows`.
    """
    token: bytes
    rows: PartitionTicket
    """The arena's partition for rows. Rows remain in the partition until the consumer has read them."""
    overflow: PartitionTicket
    """The arena's partition for rows that do not fit into `rows`.

    The replica copies the rows out of this partition immediately.
    """
    dtype: str
    """The name of the emitted tensors' dtype, which is the same in the API and in torch."""
    tensors: list[str]
    """The names of the emitted tensors."""


class RequestedRows(msgspec.Struct, frozen=True):
    """The rows that a request emits.

    The replica sends this object to vLLM's workers with the request (`features.set_argument`).
    """

    name: str
    first_position: int
    """The token position of the first emitted row. Earlier rows are not emitted."""


class RequestRows(msgspec.Struct, frozen=True, array_like=True):
    """The location of one request's rows in the tensors of a `StepRows` message."""

    name: str
    position: int
    """The position of the first row among the request's tokens."""
    first: int
    """The index of the first row in the tensors."""
    count: int


class StepRows(msgspec.Struct, frozen=True, array_like=True):
    """A message that reports written rows of one engine step. Each emitted layer has a tensor [rows, hidden].

    A step with many rows is reported in several messages.
    """

    handle: Handle
    requests: list[RequestRows]
    overflow: bool
    """Whether the rows are in the overflow memory."""


class Slice(NamedTuple):
    """Consecutive rows of one request in a batch of several requests' rows."""

    name: str
    position: int
    """The position of the first row among the request's tokens."""
    start: int
    """The index of the first row in the batch."""
    rows: int


class Written(NamedTuple):
    """The rows that one call copies into the arena. The copy may still be in progress.

    Rows for which the arena has no space are staged in the worker's memory.
    """

    requests: list[RequestRows]
    handle: Handle | None
    """The location of the rows in the arena, or None if the rows are staged."""
    overflow: bool
    """Whether the rows are in the overflow memory, or will be written into it."""
    staged: Mapping[str, torch.Tensor]
    """The staged rows, by tensor name. Empty if the rows are not staged."""
    copied: torch.cuda.Event | None
    """The CUDA event that marks the end of the copy, or None if the copy has ended."""


class RowWriter:
    """Writes rows of hidden states into the arena and reports them to the replica in order.

    Must be called on the worker's main thread. The methods do not wait for the GPU. They wait for space in the arena
    only if too many bytes are staged.
    """

    def __init__(self, attachment: Attachment, *, device: torch.device) -> None:
        """Opens the arena and connects to the replica.

        Raises NotReadyError if the arena cannot be opened, and OSError if the replica does not listen.
        """
        self.tensors = attachment.tensors
        self._writer, self._overflow = ArenaWriter(attachment.rows), ArenaWriter(attachment.overflow)
        self._overflow_bytes = attachment.overflow.size_bytes
        self._dtype_name = attachment.dtype
        self._dtype: torch.dtype = getattr(torch, attachment.dtype)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_SEND_TIMEOUT_S)
        self._socket.connect("\0" + attachment.address)
        self._socket.send(attachment.token)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            _pin(self._writer.room)
            _pin(self._overflow.room)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._last: Future[None] | None = None
        self._staged_bytes = 0
        self._staged_lock = threading.Lock()

    def copy(self, states: Mapping[str, torch.Tensor], slices: Sequence[Slice]) -> list[Written]:
        """Starts to copy slices of `states` into the arena. Returns the started writes, which `send` reports.

        `states` contains [tokens, hidden] tensors by name. On a GPU, the copy runs on its own stream, and the compute
        stream may overwrite `states` after this call.
        """
        self._check()
        row_bytes = sum(rows.shape[1] * self._dtype.itemsize for rows in states.values())
        limit = max_rows(self._overflow_bytes, row_bytes=row_bytes, tensors=len(states))
        return [self._copy(states, part) for part in _split(slices, limit)]

    def send(self, written: Sequence[Written], counts: Mapping[str, int]) -> None:
        """Reports written rows to the replica. If rows are still being copied, a thread reports them after the copy.

        `counts` limits the number of reported rows of some requests, by request name.
        """
        left = dict(counts)
        for part in written:
            requests = _limit_rows(part.requests, left)
            if self._last is None and part.handle is not None and part.copied is None:
                self._report(part.handle, requests, overflow=part.overflow)
            else:
                self._last = self._thread.submit(self._finish, part, requests)

    # -- internals

    def _check(self) -> None:
        """Raises the reporting thread's last failure, if any. Blocks while too many bytes are staged."""
        if self._last is not None and (self._last.done() or self._staged_bytes > _MAX_STAGED_BYTES):
            self._last.result()
            self._last = None

    def _copy(self, states: Mapping[str, torch.Tensor], slices: Sequence[Slice]) -> Written:
        total = sum(part.rows for part in slices)
        shapes = {name: (total, rows.shape[1]) for name, rows in states.items()}
        contents = without_content(shapes, self._dtype_name)
        reserved = self._writer.try_reserve(contents)
        overflow = reserved is None
        if overflow and not self._staged_bytes:
            # While rows are staged, only the thread uses the overflow memory.
            reserved = self._overflow.try_reserve(contents)
        targets = self._targets(reserved) if reserved else self._stage(shapes)
        pieces = {name: [rows[run] for run in _runs(slices)] for name, rows in states.items()}
        copied = _copy(pieces, targets, stream=self._stream)
        ends = accumulate(each.rows for each in slices)
        requests = [
            RequestRows(each.name, each.position, end - each.rows, each.rows)
            for each, end in zip(slices, ends, strict=True)
        ]
        handle = reserved.handle if reserved else None
        return Written(requests, handle, overflow, {} if reserved else targets, copied)

    def _targets(self, reserved: Reserved) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array).view(self._dtype) for name, array in reserved.tensors.items()}

    def _stage(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
        pinned = self._stream is not None
        staged = {name: torch.empty(shape, dtype=self._dtype, pin_memory=pinned) for name, shape in shapes.items()}
        self._count_staged(sum(rows.nbytes for rows in staged.values()))
        return staged

    def _count_staged(self, size_bytes: int) -> None:
        with self._staged_lock:
            self._staged_bytes += size_bytes

    def _finish(self, written: Written, requests: list[RequestRows]) -> None:
        """Waits for the copy, moves staged rows into the arena, and reports the rows.

        Runs on the reporting thread.
        """
        if written.copied is not None:
            written.copied.synchronize()
        handle = written.handle
        if handle is None:
            shapes = {name: tuple(rows.shape) for name, rows in written.staged.items()}
            reserved = self._overflow.reserve(without_content(shapes, self._dtype_name))
            for name, target in self._targets(reserved).items():
                target.copy_(written.staged[name])
            handle = reserved.handle
            self._count_staged(-sum(rows.nbytes for rows in written.staged.values()))
        self._report(handle, requests, overflow=written.overflow)

    def _report(self, handle: Handle, requests: list[RequestRows], *, overflow: bool) -> None:
        self._socket.send(msgspec.msgpack.encode(StepRows(handle, requests, overflow)))


def _copy(
    pieces: Mapping[str, list[torch.Tensor]],
    targets: Mapping[str, torch.Tensor],
    *,
    stream: torch.cuda.Stream | None,
) -> torch.cuda.Event | None:
    """Copies rows to the host. With a stream, returns an event that marks the end of the copy.

    The compute stream first gathers the rows, because the next replay of its CUDA graph overwrites them.
    """
    if stream is None:
        for name, parts in pieces.items():
            sizes = [len(part) for part in parts]
            for target, part in zip(torch.split(targets[name], sizes), parts, strict=True):
                target.copy_(part)
        return None
    gathered = {name: torch.cat(parts).to(targets[name].dtype) for name, parts in pieces.items()}
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for name, rows in gathered.items():
            targets[name].copy_(rows, non_blocking=True)
            rows.record_stream(stream)
    return cast("torch.cuda.Event", stream.record_event())


def _pin(memory: memoryview) -> None:
    """Page-locks host memory for copies from the GPU.

    The driver copies data to other memory in two steps, and the worker would wait for both.
    """
    cuda: Any = torch.cuda
    address = np.frombuffer(memory, np.uint8).ctypes.data
    cuda.check_error(int(cuda.cudart().cudaHostRegister(address, memory.nbytes, 0)))


def _split(slices: Sequence[Slice], max_rows: int) -> list[list[Slice]]:
    """Groups slices into lists with at most `max_rows` rows in total.

    Splits a slice across lists if it does not fit into the current list.
    """
    parts: list[list[Slice]] = [[]]
    space = max_rows
    for each in slices:
        left = each
        while left.rows > space:
            if space:
                parts[-1].append(left._replace(rows=space))
                left = left._replace(position=left.position + space, start=left.start + space, rows=left.rows - space)
            parts.append([])
            space = max_rows
        parts[-1].append(left)
        space -= left.rows
    return parts


def _runs(slices: Sequence[Slice]) -> list[slice]:
    """Returns the rows of the slices as ranges of the batch. Combines slices that are adjacent in the batch."""
    runs: list[slice] = []
    for each in slices:
        start, end = each.start, each.start + each.rows
        if runs and runs[-1].stop == start:
            start = runs.pop().start
        runs.append(slice(start, end))
    return runs


def _limit_rows(requests: list[RequestRows], left: dict[str, int]) -> list[RequestRows]:
    """Limits the number of rows of each request to its number in `left`. Returns the limited requests.

    Does not limit requests that are not in `left`. Subtracts each returned request's number of rows from `left`.
    """
    if not left:
        return requests
    limited: list[RequestRows] = []
    for each in requests:
        count = min(each.count, left.get(each.name, each.count))
        if each.name in left:
            left[each.name] -= count
        limited.append(RequestRows(each.name, each.position, each.first, count))
    return limited
