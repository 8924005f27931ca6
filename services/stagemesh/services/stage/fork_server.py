"""Forks the processes of stages, so that they share the libraries that this process has imported.

`python -m stagemesh.services.stage.fork_server --preload MODULE:FUNCTION --parent-pid PID` calls the function, which
imports the libraries of an engine. Then it forks a stage's process for each request that it receives on its standard
input (`stagemesh.common.process.stage_process`), until the other end is closed.

This process has one thread, and uses neither gRPC nor an event loop. When it ends, the kernel kills the processes that
it has forked.
"""

import argparse
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from stagemesh.common.plugins.entry_points import import_factory
from stagemesh.common.process.config import load_config
from stagemesh.common.process.lifecycle import die_with_parent, run_service
from stagemesh.common.process.stage_process import ForkRequest, StageConfig, receive_request
from stagemesh.services.stage.process import serve

# As in `stagemesh.services.stage.__main__`. Processes that an engine spawns import this module first, too.
gc.set_threshold(700, 1000, 1000)

_STDIN, _STDOUT, _STDERR = range(3)


@dataclass(frozen=True)
class _Child:
    process_id: int
    status: int
    """The pipe to which the exit status is written."""


class ForkServer:
    """Forks a process for each request that arrives on a socket, and reports its id and its exit status."""

    def __init__(self, requests: socket.socket) -> None:
        self._requests = requests
        self._process_id = os.getpid()
        self._children: dict[int, _Child] = {}
        """The running processes, by the descriptor (pidfd) of each one."""
        self._poll = select.poll()
        self._poll.register(requests, select.POLLIN)

    def run(self) -> ForkRequest | None:
        """Returns None when the other end of the socket is closed. In each forked process, returns its request."""
        while True:
            for descriptor, _ in self._poll.poll():
                if descriptor in self._children:
                    self._report_end(descriptor)
                elif (request := receive_request(self._requests)) is None:
                    return None
                elif self._fork(request):
                    return request

    def _fork(self, request: ForkRequest) -> bool:
        """Forks a process. Returns whether the caller is this process."""
        try:
            process_id = os.fork()
        except OSError as exc:
            # The launcher starts the process itself when the pipe ends.
            sys.stderr.write(f"cannot fork the process of {request.config}: {exc.strerror}\n")
            os.close(request.log)
            os.close(request.status)
            return False
        # Both processes do this, so that neither can run ahead of it.
        os.setpgid(process_id, process_id)
        if process_id == 0:
            self._become(request)
            return True
        os.close(request.log)
        child = _Child(process_id, request.status)
        handle = os.pidfd_open(process_id)
        self._children[handle] = child
        self._poll.register(handle, select.POLLIN)
        if not _write_line(child, process_id):
            os.kill(process_id, signal.SIGKILL)
        return False

    def _become(self, request: ForkRequest) -> None:
        """Binds a forked process to the server, closes the server's descriptors, and directs the output to the log."""
        die_with_parent(self._process_id)
        for handle, child in self._children.items():
            os.close(handle)
            os.close(child.status)
        os.close(request.status)
        self._requests.detach()
        null = os.open(os.devnull, os.O_RDONLY)
        for descriptor, stream in ((null, _STDIN), (request.log, _STDOUT), (request.log, _STDERR)):
            os.dup2(descriptor, stream)
        os.close(null)
        os.close(request.log)

    def _report_end(self, handle: int) -> None:
        child = self._children.pop(handle)
        self._poll.unregister(handle)
        os.close(handle)
        _, status = os.waitpid(child.process_id, 0)
        _write_line(child, os.waitstatus_to_exitcode(status))
        os.close(child.status)


def _write_line(child: _Child, number: int) -> bool:
    """Writes a line to the status pipe of a process. Returns False if the other end is closed."""
    with suppress(BrokenPipeError):
        os.write(child.status, f"{number}\n".encode())
        return True
    return False


def _run_stage(request: ForkRequest, after_fork: Callable[[], None] | None) -> int:
    """Runs a stage's process after its fork. Returns its exit status."""
    _set_title(f"{sys.executable} -u -m stagemesh.services.stage --config {request.config}")
    config = load_config(StageConfig, request.config)
    if after_fork is not None:
        after_fork()
    return run_service(partial(serve, config))


def _set_title(title: str) -> None:
    with suppress(ImportError):
        from setproctitle import setproctitle

        setproctitle(title)


def main() -> int:
    """Reads the command line, and runs the server. Returns the exit status of this process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preload", help="Call this MODULE:FUNCTION before the first fork. Calls none if omitted.")
    parser.add_argument("--parent-pid", type=int, required=True, help="End with the process of this id. Required.")
    arguments = parser.parse_args()
    die_with_parent(arguments.parent_pid)
    after_fork: Callable[[], None] | None = import_factory(arguments.preload)() if arguments.preload else None
    # Otherwise a search for garbage in a forked process would copy the pages of all shared objects.
    gc.collect()
    gc.freeze()
    request = ForkServer(socket.socket(fileno=_STDIN)).run()
    return 0 if request is None else _run_stage(request, after_fork)


if __name__ == "__main__":
    sys.exit(main())
