"""Executors, which run a worker outside the event loop: on a thread of this process, or in several processes."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stagemesh.common.errors import NotReadyError, UnavailableError
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.parallel.process_executor import ProcessExecutor

if TYPE_CHECKING:
    from stagemesh.services.engines.diffusion.worker import DiffusionWorker


class ThreadExecutor:
    """Runs one worker on a single thread of this process. Executes calls one at a time, in the order in which they are
    made."""

    def __init__(self, folder: Path, options: DiffusionOptions) -> None:
        self._folder, self._options = folder, options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diffusion")
        self._worker: Any = None

    async def start(self, report: Callable[[str], None]) -> None:
        """Creates the worker. Calls `report` with a description of the current startup phase."""
        report("importing diffusers")
        worker_class = await self._run(import_worker)
        self._worker = await self._run(partial(worker_class, self._folder, self._options))

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a method of the worker or of its parts, such as "runner.decode".

        Returns the method's result or raises its error. Raises UnavailableError if the worker has ended.
        """
        if self._worker is None:
            raise UnavailableError("the engine is closed")
        return await self._run(lambda: attrgetter(method)(self._worker)(*args, **kwargs))

    async def wait_failed(self) -> str:
        """Waits until the worker fails. Returns the cause as a message."""
        # A thread ends only with its process.
        await asyncio.Event().wait()
        raise AssertionError("the event is never set")

    async def close(self) -> None:
        """Shuts the worker down. May be called more than once."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await self._run(worker.shutdown)
        self._thread.shutdown(wait=False)

    # -- inner workings

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


Executor: TypeAlias = ThreadExecutor | ProcessExecutor
"""Runs a `DiffusionWorker` outside the event loop. Both executors have the same methods."""


def make_executor(folder: Path, options: DiffusionOptions) -> Executor:
    """Returns a thread executor if `options.parallel` specifies one process, otherwise a process executor."""
    return (ThreadExecutor if options.parallel.ranks == 1 else ProcessExecutor)(folder, options)


def import_worker() -> "type[DiffusionWorker]":
    """Imports and returns `DiffusionWorker`. Raises NotReadyError (MISSING_MODULE) if a required module is not
    installed."""
    try:
        from stagemesh.services.engines.diffusion.worker import DiffusionWorker
    except ImportError as exc:
        raise NotReadyError(
            f"the diffusion engine needs the module {exc.name}; install Stagemesh with its extra diffusion",
            reason="MISSING_MODULE",
        ) from exc
    return DiffusionWorker
