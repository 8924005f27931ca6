"""The process of one of several workers: `python -m …rank SOCKET PARENT_PID`. It ends with its parent."""

import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from stagemesh.common.errors import InternalError, NotReadyError, StagemeshError
from stagemesh.common.logs import configure_logging
from stagemesh.common.process_lifecycle import die_with_parent
from stagemesh.services.engines.diffusion.parallel.rank_messages import RankCall, Reply, Setup, framed, receive

if TYPE_CHECKING:
    from stagemesh.services.engines.diffusion.worker import DiffusionWorker

_ENDED = 0
_NOT_MADE = 1


def main(arguments: Sequence[str]) -> int:
    """Does as it is told until the other end of the socket closes; returns the exit status."""
    descriptor, parent_pid = map(int, arguments)
    die_with_parent(parent_pid)
    # Ctrl-C goes to the whole terminal; when a worker ends is up to the stage process.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    configure_logging()
    with socket.socket(fileno=descriptor) as connection:
        try:
            return _serve(connection)
        except (EOFError, OSError):
            return _ENDED


def _serve(connection: socket.socket) -> int:
    setup: Setup = receive(connection)
    try:
        worker = _make(setup)
    except Exception as exc:  # noqa: BLE001  # whatever a library raises
        connection.sendall(framed(_failed(exc)))
        # Not gone before the other ranks have said the same.
        connection.recv(1)
        return _NOT_MADE
    connection.sendall(framed(Reply()))
    while True:
        connection.sendall(framed(_answer(worker, receive(connection), first=setup.rank == 0)))


def _make(setup: Setup) -> "DiffusionWorker":
    try:
        import torch

        from stagemesh.services.engines.diffusion.parallel.ranks import Ranks
        from stagemesh.services.engines.diffusion.worker import DiffusionWorker
    except ImportError as exc:
        raise NotReadyError(
            f"the diffusion engine needs the module {exc.name}; install Stagemesh with its extra diffusion",
            reason="MISSING_MODULE",
        ) from exc
    torch.set_num_threads(1)
    return DiffusionWorker(setup.folder, setup.options, ranks=Ranks(setup.options, rank=setup.rank, store=setup.store))


def _answer(worker: "DiffusionWorker", order: RankCall, *, first: bool) -> Reply:
    try:
        value = getattr(worker, order.method)(*order.args, **order.kwargs)
    except Exception as exc:  # noqa: BLE001  # whatever a model raises
        return _failed(exc)
    return Reply(value if first else None, failures=_reasons(value))


def _failed(exc: Exception) -> Reply:
    if not isinstance(exc, StagemeshError):
        exc = InternalError(f"the model failed: {type(exc).__name__}: {exc}")
    return Reply(error=exc, failures=(exc.reason,))


def _reasons(value: Any) -> tuple[str | None, ...]:
    if not isinstance(value, list):
        return ()
    each = cast("list[object]", value)
    return tuple(error.reason if isinstance(error, StagemeshError) else None for error in each)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Libraries' threads that still wait for another rank would keep the process.
    os._exit(status)
