"""Writes rows of tensors from a worker process into the replica's arena, and reports the written rows to the replica.

Also defines the messages that the worker and the replica exchange.
"""

import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple, cast

import msgspec
import torch

from stagemesh.connectors.arena.memory import ALIGNMENT_BYTES, pin_if_cuda
from stagemesh.connectors.arena.worker_writer import ArenaWriter, Handle, PartitionAddress, Reserved, without_content

OVERFLOW_DIVISOR = 4
"""The worker's total memory in the arena divided by this number is the size of the overflow memory.

The replica copies rows out of the overflow memory immediately. Therefore, rows that a consumer has not read yet do not
block the rows of other requests.
"""
_WRITES_IN_OVERFLOW = 2
"""The number of writes of maximum size that fit into the overflow memory.

With two, the worker can write the second while the replica copies the first.
"""
_SEND_TIMEOUT_S = 60.0
_MAX_STAGED_BYTES = 256 << 20
"""The total size of staged rows, in bytes, above which the worker's main thread waits.

Staged rows are rows in the worker's own memory that wait for space in the arena.
"""


def max_rows(overflow_bytes: int, *, row_bytes: int, tensors: int) -> int:
    """Returns the maximum number of rows in one write to the arena.

    `overflow_bytes` is the size of the overflow memory. `row_bytes` is the size of one row in all tensors together.
    `tensors` is the number of tensors.
    """
    return (overflow_bytes // _WRITES_IN_OVERFLOW - tensors * ALIGNMENT_BYTES) // row_bytes


def min_share_bytes(*, row_bytes: int, tensors: int) -> int:
    """Returns the smallest usable size of the worker's total memory in the arena, in bytes.

    Its overflow memory suffices for writes of one row each. `row_bytes` is the size of one row in all tensors together.
    `tensors` is the number of tensors.
    """
    return OVERFLOW_DIVISOR * _WRITES_IN_OVERFLOW * (row_bytes + tensors * ALIGNMENT_BYTES)


@dataclass(frozen=True)
class Attachment:
    """The data with which a worker connects to its replica and opens the replica's arena."""

    address: str
    """The name of the abstract Unix socket on which the replica receives the worker's messages.

    The first message is `token`. Each later message is a `StepRows`.
    """
    token: bytes
    rows: PartitionAddress
    """The ticket of the arena's partition for rows. Rows remain in this partition until the consumer has
    read them.
    """
    overflow: PartitionAddress
    """The ticket of the arena's partition for rows that do not fit into the partition `rows`.

    The replica copies rows out of this partition immediately.
    """
    tensors: dict[str, str]
    """The dtypes of the emitted tensors, by tensor name. The name of a dtype is the same in the API and in torch."""


class RequestedRows(msgspec.Struct, frozen=True):
    """Specifies which rows a request emits.

    The replica sends this object to vLLM's workers with the request (`features.set_argument`).
    """

    name: str
    first_position: int
    """The token position of the first emitted row. The rows of earlier positions are not emitted."""
    end_position: int | None = None
    """The token position after the last emitted row, or None if all later rows are emitted."""


class Slice(NamedTuple):
    """Consecutive rows of one request, within tensors with the rows of several requests."""

    name: str
    position: int
    """The token position of the first row within the request."""
    start: int
    """The index of the first row within the tensors, which belong to a model's batch or to a `StepRows` message."""
    rows: int


class StepRows(msgspec.Struct, frozen=True, array_like=True):
    """A message that reports rows that the worker has written in one engine step.

    Each tensor has the shape [rows, width]. A step with many rows is
    reported in several messages.
    """

    handle: Handle
    requests: list[Slice]
    overflow: bool
    """Whether the rows are in the overflow memory."""


class Written(NamedTuple):
    """Rows whose copy to host memory has been started. The copy may still be in progress.

    The rows are copied into the arena, or staged in the worker's memory if the arena does not have enough space.
    """

    requests: list[Slice]
    handle: Handle | None
    """The location of the rows in the arena, or None if the rows are staged."""
    overflow: bool
    """Whether the rows are written into the overflow memory, now or later, instead of the partition for rows."""
    staged: Mapping[str, torch.Tensor]
    """The rows staged in the worker's memory, by tensor name. Empty if the rows are copied into the arena."""
    copied: torch.cuda.Event | None
    """The CUDA event that marks the end of the copy, or None if the copy has ended."""


class RowWriter:
    """Writes rows into the arena and reports them to the replica in order.

    Must be called on the worker's main thread. The methods do not wait for the GPU. They wait for space in the arena
    only if more than `_MAX_STAGED_BYTES` bytes are staged.
    """

    def __init__(self, attachment: Attachment, *, device: torch.device) -> None:
        """Opens the arena and connects to the replica.

        Raises NotReadyError if the arena cannot be opened, and OSError if the replica does not accept the connection.
        """
        self.tensors = attachment.tensors
        self._writer, self._overflow = ArenaWriter(attachment.rows), ArenaWriter(attachment.overflow)
        self._overflow_bytes = attachment.overflow.size_bytes
        self._dtypes: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in self.tensors.items()}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_SEND_TIMEOUT_S)
        self._socket.connect("\0" + attachment.address)
        self._socket.send(attachment.token)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            # To other memory, the GPU's driver copies in two steps, and the worker would wait for both.
            pin_if_cuda(self._writer.room)
            pin_if_cuda(self._overflow.room)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._last: Future[None] | None = None
        self._staged_bytes = 0
        self._staged_lock = threading.Lock()

    def copy(self, states: Mapping[str, torch.Tensor], slices: Sequence[Slice]) -> list[Written]:
        """Starts to copy slices of `states` into the arena. Returns the started writes, to be reported with `send`.

        `states` contains [tokens, hidden] tensors by name. On a GPU, the copy runs on a CUDA stream of its own. The
        compute stream may overwrite `states` after this call.
        """
        self._check()
        row_bytes = sum(rows.shape[1] * self._dtypes[name].itemsize for name, rows in states.items())
        limit = max_rows(self._overflow_bytes, row_bytes=row_bytes, tensors=len(states))
        return [self._copy(states, part) for part in _split(slices, limit)]

    def send(self, written: Sequence[Written], counts: Mapping[str, int]) -> None:
        """Reports writes to the replica. If a copy is still in progress, a thread reports its write after the copy.

        `counts` is the number of rows to report, by request name. All rows of other requests are reported.
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
        """Raises the error with which the reporting thread has failed, if any. Blocks while too many bytes
        are staged.
        """
        if self._last is not None and (self._last.done() or self._staged_bytes > _MAX_STAGED_BYTES):
            self._last.result()
            self._last = None

    def _copy(self, states: Mapping[str, torch.Tensor], slices: Sequence[Slice]) -> Written:
        total = sum(part.rows for part in slices)
        shapes = {name: (total, rows.shape[1]) for name, rows in states.items()}
        contents = without_content(shapes, self.tensors)
        reserved = self._writer.try_reserve(contents)
        overflow = reserved is None
        if overflow and not self._staged_bytes:
            # While rows are staged, only the thread uses the overflow memory.
            reserved = self._overflow.try_reserve(contents)
        targets = self._targets(reserved) if reserved else self._stage(shapes)
        pieces = {name: [rows[run] for run in _runs(slices)] for name, rows in states.items()}
        copied = _copy(pieces, targets, stream=self._stream)
        ends = accumulate(each.rows for each in slices)
        requests = [each._replace(start=end - each.rows) for each, end in zip(slices, ends, strict=True)]
        handle = reserved.handle if reserved else None
        return Written(requests, handle, overflow, {} if reserved else targets, copied)

    def _targets(self, reserved: Reserved) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array).view(self._dtypes[name]) for name, array in reserved.tensors.items()}

    def _stage(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
        pinned = self._stream is not None
        staged = {
            name: torch.empty(shape, dtype=self._dtypes[name], pin_memory=pinned) for name, shape in shapes.items()
        }
        self._count_staged(sum(rows.nbytes for rows in staged.values()))
        return staged

    def _count_staged(self, size_bytes: int) -> None:
        with self._staged_lock:
            self._staged_bytes += size_bytes

    def _finish(self, written: Written, requests: list[Slice]) -> None:
        """Waits until the rows are copied, moves staged rows into the arena, and reports the rows to the replica.

        Runs on the reporting thread.
        """
        if written.copied is not None:
            written.copied.synchronize()
        handle = written.handle
        if handle is None:
            shapes = {name: tuple(rows.shape) for name, rows in written.staged.items()}
            reserved = self._overflow.reserve(without_content(shapes, self.tensors))
            for name, target in self._targets(reserved).items():
                target.copy_(written.staged[name])
            handle = reserved.handle
            self._count_staged(-sum(rows.nbytes for rows in written.staged.values()))
        self._report(handle, requests, overflow=written.overflow)

    def _report(self, handle: Handle, requests: list[Slice], *, overflow: bool) -> None:
        self._socket.send(msgspec.msgpack.encode(StepRows(handle, requests, overflow)))


def _copy(
    pieces: Mapping[str, list[torch.Tensor]], targets: Mapping[str, torch.Tensor], *, stream: torch.cuda.Stream | None
) -> torch.cuda.Event | None:
    """Copies rows to host memory.

    `pieces` contains the rows to concatenate, and `targets` the destination, by tensor name. Without a stream, returns
    None after the copy. With a stream, starts the copy and returns an event that marks its end. The compute stream
    first gathers the rows, because the next replay of its CUDA graph overwrites them.
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


def _split(slices: Sequence[Slice], max_rows: int) -> list[list[Slice]]:
    """Groups slices into lists. The slices of a list have at most `max_rows` rows in total.

    Splits a slice that does not fit into the current list.
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
    """Returns the batch's index ranges that contain the rows of the slices. Combines adjacent ranges."""
    runs: list[slice] = []
    for each in slices:
        start, end = each.start, each.start + each.rows
        if runs and runs[-1].stop == start:
            start = runs.pop().start
        runs.append(slice(start, end))
    return runs


def _limit_rows(requests: list[Slice], left: dict[str, int]) -> list[Slice]:
    """Returns the requests, each with at most the number of rows that `left` contains for the request's name.

    Does not limit a request that is not in `left`. Subtracts the number of returned rows of each request from `left`.
    """
    if not left:
        return requests
    limited: list[Slice] = []
    for each in requests:
        count = min(each.rows, left.get(each.name, each.rows))
        if each.name in left:
            left[each.name] -= count
        limited.append(each._replace(rows=count))
    return limited
