"""Entry point of a rank, one of several worker processes: `python -m …rank_main DESCRIPTOR PARENT_PID`.

DESCRIPTOR is the file descriptor of the connection to the stage process. The rank terminates when process
PARENT_PID terminates.
"""

import os
import signal
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from stagemesh.common.errors import InternalError, StagemeshError
from stagemesh.common.process.lifecycle import die_with_parent
from stagemesh.common.process.logs import configure_logging, log_cause
from stagemesh.services.engines.diffusion.executor import RankCall, RankReply, RankSetup, import_worker

if TYPE_CHECKING:
    from stagemesh.services.engines.diffusion.worker import DiffusionWorker

ParentConnection: TypeAlias = "Connection[RankReply, Any]"

_CONNECTION_CLOSED = 0
_SETUP_FAILED = 1


def main(arguments: Sequence[str]) -> int:
    """Executes the calls that the stage process sends until the connection closes. Returns the exit status of this rank
    process.
    """
    descriptor, parent_pid = map(int, arguments)
    die_with_parent(parent_pid)
    # Ctrl-C reaches every process of the terminal. The stage process alone decides when a rank terminates.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    configure_logging()
    connection: ParentConnection = Connection(descriptor)
    with connection:
        try:
            return _serve(connection)
        except (EOFError, OSError):
            return _CONNECTION_CLOSED


def _serve(connection: ParentConnection) -> int:
    setup: RankSetup = connection.recv()
    try:
        worker = _make_worker(setup)
    except Exception as exc:  # noqa: BLE001  # libraries raise any exception
        connection.send(_failure_reply(exc))
        # The process stays alive until the connection closes, so that the other ranks can report the same failure.
        connection.poll(None)
        return _SETUP_FAILED
    connection.send(RankReply())
    while True:
        connection.send(_run_call(worker, connection.recv(), is_first=setup.rank == 0))


def _make_worker(setup: RankSetup) -> "DiffusionWorker":
    worker_class = import_worker()
    from stagemesh.services.engines.diffusion.rank_group import RankGroup

    group = RankGroup(setup.options, rank=setup.rank, store=setup.store)
    return worker_class(setup.folder, setup.options, rank_group=group)


def _run_call(worker: "DiffusionWorker", call: RankCall, *, is_first: bool) -> RankReply:
    try:
        value = attrgetter(call.method)(worker)(*call.args, **call.kwargs)
    except Exception as exc:  # noqa: BLE001  # models raise any exception
        return _failure_reply(exc)
    return RankReply(value if is_first else None, failures=_reasons(value))


def _failure_reply(exc: Exception) -> RankReply:
    if not isinstance(exc, StagemeshError):
        cause = log_cause(exc, what="the model")
        exc = InternalError(f"the model failed with a {type(exc).__name__}; {cause}", reason="ENGINE_ERROR")
    return RankReply(error=exc, failures=(exc.reason,))


def _reasons(value: Any) -> tuple[str | None, ...]:
    if not isinstance(value, list):
        return ()
    returned = cast("list[object]", value)
    return tuple(error.reason if isinstance(error, StagemeshError) else None for error in returned)


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Library threads that still wait for another rank would keep the process alive.
    os._exit(status)
