"""A worker's end: rows of hidden states go straight into the arena, and word of them to the replica."""

import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from stagemesh.connectors.arena.worker_writer import ArenaWriter, Handle, Reserved
from stagemesh.services.engines.vllm.hidden_states.row_messages import (
    Attachment,
    RequestRows,
    StepRows,
    encode_rows,
    max_rows,
)

_SEND_TIMEOUT_S = 60.0
_MAX_STAGED_BYTES = 256 << 20
"""Of rows that wait for room in the share; the engine waits too where there are more."""


class Slice(NamedTuple):
    """Some rows of a batch, and whose they are."""

    name: str
    position: int
    start: int
    rows: int


class Run(NamedTuple):
    """Rows that are copied at once: the first of them where they go, the first in the batch, and how many."""

    first: int
    start: int
    rows: int


class Written(NamedTuple):
    """Rows in the arena, or on their way into it."""

    requests: list[RequestRows]
    handle: Handle | None
    passes: bool
    staged: Mapping[str, torch.Tensor]
    """Copies for which there was no room in the arena; empty where `handle` says where they lie."""
    copied: torch.cuda.Event | None
    """When the copies are there; None where they are."""


class RowWriter:
    """Used by the worker's main thread, which waits neither for the GPU nor for room. Rows leave in order."""

    def __init__(self, attachment: Attachment, *, device: torch.device) -> None:
        """Raises NotReadyError where the arena cannot be opened, OSError where the replica does not listen."""
        self.tensors = attachment.tensors
        self._writer, self._passing = ArenaWriter(attachment.ticket), ArenaWriter(attachment.passing)
        self._passing_bytes = attachment.passing.size_bytes
        self._dtype_name = attachment.dtype
        self._dtype: torch.dtype = getattr(torch, attachment.dtype)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_SEND_TIMEOUT_S)
        self._socket.connect("\0" + attachment.address)
        self._socket.send(attachment.token)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        if self._stream is not None:
            _pin(self._writer.room)
            _pin(self._passing.room)
        self._later = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._last: Future[None] | None = None
        self._staged_bytes = 0
        self._counting = threading.Lock()

    def copy(self, states: Mapping[str, torch.Tensor], slices: Sequence[Slice]) -> list[Written]:
        """Begins to copy slices of `states`, [tokens, hidden] by tensor name, into the arena.

        On a GPU that happens beside the compute stream, which may overwrite `states` afterwards.
        """
        self._check()
        row_bytes = sum(rows.shape[1] * self._dtype.itemsize for rows in states.values())
        part = max_rows(self._passing_bytes, row_bytes=row_bytes, tensors=len(states))
        return [self._copy(states, each) for each in _parts(slices, part)]

    def send(self, written: Sequence[Written], counts: Mapping[str, int]) -> None:
        """Tells the replica, once the copies are done; of a request in `counts` no more than that many rows."""
        left = dict(counts)
        for one in written:
            requests = _counted(one.requests, left)
            if self._last is None and one.handle is not None and one.copied is None:
                self._tell(one.handle, requests, passes=one.passes)
            else:
                self._last = self._later.submit(self._finish, one, requests)

    # -- inner workings

    def _check(self) -> None:
        """Raises what has failed since, and waits while too much is staged."""
        if self._last is not None and (self._last.done() or self._staged_bytes > _MAX_STAGED_BYTES):
            self._last.result()
            self._last = None

    def _copy(self, states: Mapping[str, torch.Tensor], slices: Sequence[Slice]) -> Written:
        total = sum(one.rows for one in slices)
        shapes = {name: (total, rows.shape[1]) for name, rows in states.items()}
        reserved = self._writer.try_reserve(shapes, self._dtype_name)
        passes = reserved is None
        if passes and not self._staged_bytes:
            # While some are staged, that room is the thread's.
            reserved = self._passing.try_reserve(shapes, self._dtype_name)
        targets = self._targets(reserved) if reserved else self._staging(shapes)
        copied = None
        if self._stream is None:
            _copy(states, targets, _runs(slices))
        else:
            copied = _copy_beside(self._stream, states, targets, _runs(slices))
        handle = reserved.handle if reserved else None
        return Written(_placed(slices), handle, passes, {} if reserved else targets, copied)

    def _targets(self, reserved: Reserved) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array).view(self._dtype) for name, array in reserved.tensors.items()}

    def _staging(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
        pinned = self._stream is not None
        staging = {name: torch.empty(shape, dtype=self._dtype, pin_memory=pinned) for name, shape in shapes.items()}
        self._count_staged(sum(rows.nbytes for rows in staging.values()))
        return staging

    def _count_staged(self, size_bytes: int) -> None:
        with self._counting:
            self._staged_bytes += size_bytes

    def _finish(self, written: Written, requests: list[RequestRows]) -> None:
        """On the thread: what has to wait."""
        if written.copied is not None:
            written.copied.synchronize()
        handle = written.handle
        if handle is None:
            shapes = {name: tuple(rows.shape) for name, rows in written.staged.items()}
            reserved = self._passing.reserve(shapes, self._dtype_name)
            for name, target in self._targets(reserved).items():
                target.copy_(written.staged[name])
            handle = reserved.handle
            self._count_staged(-sum(rows.nbytes for rows in written.staged.values()))
        self._tell(handle, requests, passes=written.passes)

    def _tell(self, handle: Handle, requests: list[RequestRows], *, passes: bool) -> None:
        self._socket.send(encode_rows(StepRows(handle, requests, passes)))


def _copy(states: Mapping[str, torch.Tensor], targets: Mapping[str, torch.Tensor], runs: Sequence[Run]) -> None:
    for name, rows in states.items():
        for run in runs:
            targets[name][run.first : run.first + run.rows].copy_(rows[run.start : run.start + run.rows])


def _copy_beside(
    stream: torch.cuda.Stream,
    states: Mapping[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    runs: Sequence[Run],
) -> torch.cuda.Event:
    """Leaves the way to the host to `stream`; returns when that is done with.

    What a graph of the compute stream puts out is overwritten by its next replay, so the rows are put together there.
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


def _pin(room: memoryview) -> None:
    """Without it the driver would copy twice, and hold the worker up."""
    cuda: Any = torch.cuda
    address = np.frombuffer(room, np.uint8).ctypes.data
    cuda.check_error(int(cuda.cudart().cudaHostRegister(address, room.nbytes, 0)))


def _parts(slices: Sequence[Slice], max_rows: int) -> list[list[Slice]]:
    """The slices in parts of `max_rows` at most; one that is longer is cut."""
    parts: list[list[Slice]] = [[]]
    room = max_rows
    for one in slices:
        left = one
        while left.rows > room:
            if room:
                parts[-1].append(left._replace(rows=room))
                left = left._replace(position=left.position + room, start=left.start + room, rows=left.rows - room)
            parts.append([])
            room = max_rows
        parts[-1].append(left)
        room -= left.rows
    return parts


def _runs(slices: Sequence[Slice]) -> list[Run]:
    """Slices that are neighbours in the batch go in one copy."""
    runs: list[Run] = []
    first = 0
    for one in slices:
        if runs and runs[-1].start + runs[-1].rows == one.start:
            runs[-1] = runs[-1]._replace(rows=runs[-1].rows + one.rows)
        else:
            runs.append(Run(first, one.start, one.rows))
        first += one.rows
    return runs


def _placed(slices: Sequence[Slice]) -> list[RequestRows]:
    placed: list[RequestRows] = []
    first = 0
    for one in slices:
        placed.append(RequestRows(one.name, one.position, first, one.rows))
        first += one.rows
    return placed


def _counted(requests: list[RequestRows], left: dict[str, int]) -> list[RequestRows]:
    """The rows that count, taken off `left`."""
    if not left:
        return requests
    counted: list[RequestRows] = []
    for one in requests:
        count = min(one.count, left.get(one.name, one.count))
        if one.name in left:
            left[one.name] -= count
        counted.append(RequestRows(one.name, one.position, one.first, count))
    return counted
