"""Where a worker works: on a thread of its own, so that the event loop stays free."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from stagemesh.common.errors import NotReadyError, UnavailableError
from stagemesh.services.engines.diffusion.options import DiffusionOptions


class Executor(Protocol):
    """Has `DiffusionWorker`'s methods called, one after the other, in the order of the calls."""

    async def start(self, report: Callable[[str], None]) -> None:
        """Makes the worker."""

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """What the method returned; raises what it raised, and UnavailableError where the worker has died."""

    async def wait_failed(self) -> str:
        """Returns only if the worker dies, with the cause."""
        ...

    async def close(self) -> None:
        """Shuts the worker down. Closing twice is harmless."""


def make_executor(folder: Path, options: DiffusionOptions) -> Executor:
    """One for as many workers as the options ask for."""
    if options.parallel.ranks == 1:
        return ThreadExecutor(folder, options)
    from stagemesh.services.engines.diffusion.parallel.process_executor import ProcessExecutor

    return ProcessExecutor(folder, options)


class ThreadExecutor:
    """See `Executor`. One worker, in this process."""

    def __init__(self, folder: Path, options: DiffusionOptions) -> None:
        self._folder, self._options = folder, options
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="diffusion")
        self._worker: Any = None

    async def start(self, report: Callable[[str], None]) -> None:
        """See `Executor`."""
        report("importing diffusers")
        await self._run(self._make)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """See `Executor`."""
        if self._worker is None:
            raise UnavailableError("the engine is closed")
        return await self._run(partial(getattr(self._worker, method), *args, **kwargs))

    async def wait_failed(self) -> str:
        """See `Executor`: a thread dies with its process."""
        await asyncio.Event().wait()
        raise AssertionError("nothing sets it")

    async def close(self) -> None:
        """See `Executor`."""
        worker, self._worker = self._worker, None
        if worker is not None:
            await self._run(worker.shutdown)
        self._thread.shutdown(wait=False)

    # -- inner workings

    async def _run(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _make(self) -> None:
        try:
            from stagemesh.services.engines.diffusion.worker import DiffusionWorker
        except ImportError as exc:
            raise NotReadyError(
                f"the diffusion engine needs the module {exc.name}; install Stagemesh with its extra diffusion",
                reason="MISSING_MODULE",
            ) from exc
        self._worker = DiffusionWorker(self._folder, self._options)
