"""A worker's end: rows of hidden states go straight into the arena, and word of them to the replica."""

import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, cast

import torch

from stagemesh.connectors.arena_writer import ArenaWriter, Handle, Reserved
from stagemesh.connectors.memory_file import ALIGNMENT_BYTES
from stagemesh.services.engines.vllm.rows import Attachment, RequestRows, StepRows, encode_rows

_SEND_TIMEOUT_S = 60.0
_SHARE_PARTS = 4
"""A write takes this part of the share at most, so that the next finds room while one is read."""
_MAX_STAGED_BYTES = 256 << 20
"""Of rows that wait for room in the share; the engine waits too where there are more."""


class Slice(NamedTuple):
    """Some rows of a batch, and whose they are."""

    name: str
    position: int
    start: int
    rows: int


class Written(NamedTuple):
    """Rows in the arena, or on their way into it."""

    requests: list[RequestRows]
    handle: Handle | None
    staged: Mapping[str, torch.Tensor]
    """Copies for which there was no room in the arena; empty where `handle` says where they lie."""
    copied: torch.cuda.Event | None
    """When the copies are there; None where they are."""


class RowWriter:
    """Used by the worker's main thread, which waits neither for the GPU nor for room. Rows leave in order."""

    def __init__(self, attachment: Attachment, *, device: torch.device) -> None:
        """Raises NotReadyError where the arena cannot be opened, OSError where the replica does not listen."""
        self.tensors = attachment.tensors
        self._writer = ArenaWriter(attachment.ticket)
        self._part_bytes = attachment.ticket.size_bytes // _SHARE_PARTS
        self._dtype_name = attachment.dtype
        self._dtype: torch.dtype = getattr(torch, attachment.dtype)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(_SEND_TIMEOUT_S)
        self._socket.connect("\0" + attachment.address)
        self._socket.send(attachment.token)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._later = ThreadPoolExecutor(1, thread_name_prefix="rows")
        self._last: Future[None] | None = None
        self._staged_bytes = 0

    def copy(self, states: Mapping[str, torch.Tensor], slices: Sequence[Slice]) -> list[Written]:
        """Begins to copy slices of `states`, [tokens, hidden] by tensor name, into the arena.

        On a GPU that happens beside the compute stream, which may overwrite `states` afterwards.
        """
        self._check()
        row_bytes = sum(rows.shape[1] * self._dtype.itemsize for rows in states.values())
        room_bytes = self._part_bytes - len(states) * ALIGNMENT_BYTES
        return [self._copy(states, part) for part in _parts(slices, max(1, room_bytes // row_bytes))]

    def send(self, written: Sequence[Written], counts: Mapping[str, int]) -> None:
        """Tells the replica, once the copies are done; of a request in `counts` no more than that many rows."""
        left = dict(counts)
        for one in written:
            requests = _counted(one.requests, left)
            if self._last is None and one.handle is not None and one.copied is None:
                self._tell(one.handle, requests)
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
        # While some are staged, the writer is the thread's.
        reserved = None if self._staged_bytes else self._writer.try_reserve(shapes, self._dtype_name)
        targets = self._targets(reserved) if reserved else self._staging(shapes)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for name, rows in states.items():
                for first, start, count in _runs(slices):
                    targets[name][first : first + count].copy_(rows[start : start + count], non_blocking=True)
                if self._stream is not None:
                    rows.record_stream(self._stream)
        copied = cast("torch.cuda.Event", self._stream.record_event()) if self._stream is not None else None
        handle = reserved.handle if reserved else None
        return Written(_placed(slices), handle, {} if reserved else targets, copied)

    def _targets(self, reserved: Reserved) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array).view(self._dtype) for name, array in reserved.tensors.items()}

    def _staging(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, torch.Tensor]:
        pinned = self._stream is not None
        staging = {name: torch.empty(shape, dtype=self._dtype, pin_memory=pinned) for name, shape in shapes.items()}
        self._staged_bytes += sum(rows.nbytes for rows in staging.values())
        return staging

    def _finish(self, written: Written, requests: list[RequestRows]) -> None:
        """On the thread: what has to wait."""
        if written.copied is not None:
            written.copied.synchronize()
        handle = written.handle
        if handle is None:
            shapes = {name: tuple(rows.shape) for name, rows in written.staged.items()}
            reserved = self._writer.reserve(shapes, self._dtype_name)
            for name, target in self._targets(reserved).items():
                target.copy_(written.staged[name])
            handle = reserved.handle
            self._staged_bytes -= sum(rows.nbytes for rows in written.staged.values())
        self._tell(handle, requests)

    def _tell(self, handle: Handle, requests: list[RequestRows]) -> None:
        self._socket.send(encode_rows(StepRows(handle, requests)))


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


def _runs(slices: Sequence[Slice]) -> list[tuple[int, int, int]]:
    """Slices that are neighbours in the batch go in one copy: the first row there, the first here, and how many."""
    runs: list[tuple[int, int, int]] = []
    first = 0
    for one in slices:
        if runs and runs[-1][1] + runs[-1][2] == one.start:
            runs[-1] = (runs[-1][0], runs[-1][1], runs[-1][2] + one.rows)
        else:
            runs.append((first, one.start, one.rows))
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
