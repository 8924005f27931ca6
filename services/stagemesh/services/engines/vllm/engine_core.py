"""vLLM's engine core: its process, calls to it, and its failures.

vLLM starts its engine core in a new interpreter, which imports vLLM again. A forked process shares the imports,
but a process with threads must not be forked. Therefore the stage forks a process in time, which waits until vLLM
starts the engine core. This module does not import vLLM.
"""

import asyncio
import gc
import os
import pickle
import socket
import sys
import traceback
from collections.abc import Callable, Coroutine, Generator
from contextlib import contextmanager, suppress
from importlib import import_module
from multiprocessing import popen_spawn_posix, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from stagemesh.common.errors import InternalError, UnavailableError
from stagemesh.common.process import settings
from stagemesh.common.process.lifecycle import die_with_parent

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM


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
            self._socket.sendall(ForkingPickler.dumps((settings.variables(), process)))
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
        settings.replace_variables(environment)
        # When its core ends, vLLM would collect the objects of all imports, and thereby copy their shared memory. That
        # takes a second, and the memory is freed in any case when this process ends.
        gc.unfreeze = lambda: None
        return int(process._bootstrap(parent_sentinel=parent.fileno()))  # noqa: SLF001  # as multiprocessing's own ways
    except BaseException:  # noqa: BLE001  # the stack below belongs to the parent
        traceback.print_exc()
        return 1
    finally:
        sys.stderr.flush()


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


T = TypeVar("T")

_DEATH_POLL_S = 0.2


class CoreRefusalError(InternalError):
    """Raised if vLLM's engine core or a worker raises an exception during a call.

    The error's message includes vLLM's message.
    """

    default_reason = "ENGINE_ERROR"


def shut_down(llm: "AsyncLLM") -> None:
    """Ends vLLM's processes and releases its sockets and tasks. Call it on the thread that started the processes.

    vLLM kills an engine core that does not end in time. If the core ends at that moment by itself, vLLM raises
    NoSuchProcess instead of releasing anything. This function then releases the rest.
    """
    from psutil import NoSuchProcess

    try:
        llm.shutdown()
    except NoSuchProcess:
        cast("Any", llm.engine_core).resources()
        llm.shutdown()


async def core_call(llm: "AsyncLLM", call: Coroutine[Any, Any, T]) -> T:
    """Awaits a call to vLLM's engine core and returns the call's result.

    Raises CoreRefusalError if the core raises an exception. Raises UnavailableError if the core terminates during the
    call.
    """
    task = asyncio.ensure_future(call)
    try:
        # A terminated core never answers the calls that it received.
        while not (await asyncio.wait([task], timeout=_DEATH_POLL_S))[0] and not llm.errored:
            pass
    finally:
        task.cancel()
    if not task.done():
        raise UnavailableError("vLLM's engine core died during the call", reason="ENGINE_FAILED")
    try:
        return task.result()
    except Exception as exc:  # vLLM converts every failure of its core to a bare Exception
        if llm.errored:
            raise UnavailableError(f"vLLM's engine core has died: {exc}", reason="ENGINE_FAILED") from exc
        raise CoreRefusalError(f"vLLM rejects the call: {exc}") from exc


async def worker_call(llm: "AsyncLLM", method: str, *args: object) -> list[Any]:
    """Calls a method of all vLLM workers. Returns a list of the results, one for each worker.

    Raises the same errors as `core_call`.
    """
    return await core_call(llm, cast("Coroutine[Any, Any, list[Any]]", llm.collective_rpc(method, args=args)))


async def runner_call(llm: "AsyncLLM", method: str, *args: object) -> list[Any]:
    """Calls a method of all vLLM workers' model runners. Returns a list of the results, one for each worker.

    The method belongs to a feature's mixin for model runners. Raises the same errors as `core_call`.
    """
    return await worker_call(llm, "call_runner", method, *args)


_FAILURE_FILE = "STAGEMESH_VLLM_LOAD_FAILURE"
_MAX_FAILURE_BYTES = 2_000


class LoadFailure:
    """The replica's side: an anonymous file into which workers that start afterwards write their first error."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("stagemesh-load-failure", os.MFD_CLOEXEC)
        settings.set_library_variables({_FAILURE_FILE: f"/proc/{os.getpid()}/fd/{self._fd}"}, replace=True)

    def read(self) -> str:
        """Returns the error that a worker has recorded, or an empty text."""
        return os.pread(self._fd, _MAX_FAILURE_BYTES, 0).decode(errors="replace")

    def close(self) -> None:
        """Closes the file."""
        os.close(self._fd)


def record_failure(error: Exception) -> None:
    """Records an error in a worker's process, if no worker has recorded one.

    Does nothing in a worker on another node than the replica, which has only its own log.
    """
    with suppress(OSError), Path(settings.library_variable(_FAILURE_FILE)).open("r+b") as file:
        if not file.read(1):
            file.seek(0)
            text = " ".join([type(error).__name__ + ":", *str(error).split()])
            file.write(text.encode()[:_MAX_FAILURE_BYTES])


def prepare_environment() -> None:
    """Sets the environment variables that vLLM reads when it is imported.

    Does not change variables that are already set.
    """
    settings.set_library_variables(
        {
            **settings.COMPUTE_VARIABLES,
            # On a CPU, oneDNN prepares a kernel for each number of tokens. It would retain 1,024 of up to 100 kB.
            "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
    )


_PRELOADED_MODULES = (
    "vllm.usage.usage_lib",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "stagemesh.services.engines.vllm.engine",
    "stagemesh.services.engines.vllm.arguments",
    "stagemesh.services.engines.vllm.requests",
    "stagemesh.services.engines.vllm.messages.feature",
    "stagemesh.services.engines.vllm.worker",
)


def preload() -> Callable[[], None]:
    """Imports vLLM. Returns the function that each forked process calls before it starts a thread.

    If vLLM cannot be imported, the stage reports that when it loads its engine.
    """
    prepare_environment()
    try:
        # First, because vLLM decorates functions of these modules with the compiler that the plugin replaces.
        import_module("vllm.plugins").load_general_plugins()
        for module in _PRELOADED_MODULES:
            import_module(module)
    except ImportError:
        return lambda: None
    return fork_core
