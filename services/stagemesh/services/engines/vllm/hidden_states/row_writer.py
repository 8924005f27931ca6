"""Writes hidden states from a worker's process into the replica's arena, and reports the rows to the replica."""

import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from stagemesh.connectors.arena.worker_writer import ArenaWriter, Handle, Reserved, without_content
from stagemesh.services.engines.vllm.hidden_states.row_messages import (
    Attachment,
    RequestRows,
    StepRows,
    encode_rows,
    max_rows,
)

_SEND_TIMEOUT_S = 60.0
_MAX_STAGED_BYTES = 256 << 20
"""The maximum size of the staged rows, in bytes. Staged rows wait in the worker's memory for space in the arena.

If more bytes are staged, the worker's main thread waits, too.
"""


class Slice(NamedTuple):
    """Consecutive rows of one request in a batch of several requests' rows."""

    name: str
    position: int
    """The position of the first row among the request's tokens."""
    start: int
    """The index of the first row in the batch."""
    rows: int


class Run(NamedTuple):
    """Consecutive rows of a batch that are copied together into a target tensor."""

    first: int
    """The index of the first row in the target tensor."""
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
        copied = None
        if self._stream is None:
            _copy(states, targets, _runs(slices))
        else:
            copied = _copy_on_stream(self._stream, states, targets, _runs(slices))
        handle = reserved.handle if reserved else None
        return Written(_request_rows(slices), handle, overflow, {} if reserved else targets, copied)

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
        self._socket.send(encode_rows(StepRows(handle, requests, overflow)))


def _copy(states: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor], runs: Sequence[Run]) -> None:
    for name, rows in states.items():
        for run in runs:
            targets[name][run.first : run.first + run.rows].copy_(rows[run.start : run.start + run.rows])


def _copy_on_stream(
    stream: torch.cuda.Stream,
    states: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    runs: Sequence[Run],
) -> torch.cuda.Event:
    """Copies rows to the host on `stream`. Returns an event that marks the end of the copy.

    The compute stream first gathers the rows, because the next replay of its CUDA graph overwrites `states`.
    """
    gathered = {
        name: torch.cat([rows[run.start : run.start + run.rows] for run in runs]).to(targets[name].dtype)
        for name, rows in states.items()
    }
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


def _runs(slices: Sequence[Slice]) -> list[Run]:
    """Combines slices that are adjacent in the batch into runs."""
    runs: list[Run] = []
    first = 0
    for each in slices:
        if runs and runs[-1].start + runs[-1].rows == each.start:
            runs[-1] = runs[-1]._replace(rows=runs[-1].rows + each.rows)
        else:
            runs.append(Run(first, each.start, each.rows))
        first += each.rows
    return runs


def _request_rows(slices: Sequence[Slice]) -> list[RequestRows]:
    """Returns the location of each slice's rows in the target tensors, which contain the slices in order."""
    described: list[RequestRows] = []
    first = 0
    for each in slices:
        described.append(RequestRows(each.name, each.position, first, each.rows))
        first += each.rows
    return described


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
