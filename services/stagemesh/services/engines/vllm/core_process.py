"""Runs vLLM's engine core in a process that was forked before the stage's process started its threads.

vLLM starts its engine core in a new interpreter, which imports vLLM again. A forked process shares the imports, but a
process with threads must not be forked. Therefore the stage forks a process in time, which waits until vLLM starts the
engine core.
"""

import gc
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import popen_spawn_posix, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any

from stagemesh.common.process_lifecycle import die_with_parent
from stagemesh.common.settings import replace_variables, variables


class ForkedProcess:
    """A forked process that waits for the process object (`multiprocessing`) that it shall run."""

    def __init__(self) -> None:
        """Forks the process. Must be called before this process starts a thread. Returns only in this process."""
        parent_pid = os.getpid()
        self._socket, theirs = socket.socketpair()
        self.process_id = os.fork()
        if self.process_id == 0:
            self._socket.close()
            os._exit(_run_received(theirs, parent_pid=parent_pid))
        theirs.close()

    def run(self, process: BaseProcess) -> int:
        """Runs a process object in the forked process, with the environment variables of this process.

        Returns a file descriptor that becomes readable when the forked process ends. Raises OSError if it has ended.
        """
        with self._socket:
            self._socket.sendall(ForkingPickler.dumps((variables(), process)))
            # The other end remains open until the forked process ends.
            self._socket.shutdown(socket.SHUT_WR)
            return self._socket.detach()


def _run_received(parent: socket.socket, *, parent_pid: int) -> int:
    """Runs the process object that the parent sends. Returns the exit status."""
    try:
        die_with_parent(parent_pid)
        with parent.makefile("rb") as stream:
            data = stream.read()
        if not data:
            return 0
        environment, process = pickle.loads(data)  # noqa: S301  # from this program itself
        replace_variables(environment)
        # When its core ends, vLLM would collect the objects of all imports, and thereby copy their shared memory. That
        # takes a second, and the memory is freed in any case when this process ends.
        gc.unfreeze = _keep_frozen
        return int(process._bootstrap(parent_sentinel=parent.fileno()))  # noqa: SLF001  # as multiprocessing's own ways
    except BaseException:  # noqa: BLE001  # the stack below belongs to the parent
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()


def _keep_frozen() -> None:
    """Does nothing. Replaces `gc.unfreeze`."""


class _Popen(popen_spawn_posix.Popen):
    """Starts a process object in a process that was forked before."""

    def __init__(self, process: BaseProcess, forked: ForkedProcess) -> None:
        self._forked = forked
        super().__init__(process)

    def _launch(self, process_obj: BaseProcess) -> None:
        set_spawning_popen(self)
        try:
            self.sentinel = self._forked.run(process_obj)
        finally:
            set_spawning_popen(None)
        self.pid = self._forked.process_id
        self.finalizer = util.Finalize(self, os.close, (self.sentinel,))


_forked: list[ForkedProcess] = []


def fork_core() -> None:
    """Forks the process for the engine core of this process. Must be called before this process starts a thread."""
    _forked.append(ForkedProcess())


class _CoreProcess(SpawnProcess):
    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:  # noqa: N802  # the name in multiprocessing
        # A queue for tensors consists of descriptors, which only a new process inherits.
        if _forked and process_obj._kwargs.get("tensor_queue") is None:  # type: ignore[attr-defined]  # noqa: SLF001
            return _Popen(process_obj, _forked.pop())
        return SpawnProcess._Popen(process_obj)  # noqa: SLF001


class _Context(SpawnContext):
    Process = _CoreProcess


@contextmanager
def forked_core() -> Generator[None]:
    """Within this context, vLLM starts its engine core in the process that `fork_core` has forked, if there is one."""
    utils: Any = import_module("vllm.v1.engine.utils")
    start = utils.get_mp_context
    utils.get_mp_context = _Context if _forked else start
    try:
        yield
    finally:
        utils.get_mp_context = start
