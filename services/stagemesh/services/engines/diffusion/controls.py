"""What an operator may change of a diffusion engine while it serves: sleep and profiles. Adapters are `lending`'s."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.cleanup import run_to_completion
from stagemesh.services.engines.diffusion.adapters.manager import AdapterManager
from stagemesh.services.engines.diffusion.executor import Executor
from stagemesh.services.engines.profiles import Profiles, private_folder
from stagemesh.services.engines.sleep import SleepState

LEVELS = (1, 2)
WEIGHTS, BUFFERS = "weights", "buffers"


class Sleeper:
    """Puts the worker to sleep, and wakes it."""

    def __init__(self, executor: Executor, lending: AdapterManager, *, stage: str) -> None:
        self._executor, self._lending = executor, lending
        self._lock = asyncio.Lock()
        self._sleepers = SleepState(stage=stage)

    def check_sleep(self, level: int) -> None:
        """See `SleepControl.check_sleep`."""
        if level not in LEVELS:
            raise InvalidRequestError(
                f"level is {level}; it must be 1 (give back the weights' memory) or 2 (all memory of the engine)"
            )

    def check_awake(self) -> None:
        """Raises NotReadyError while anything sleeps."""
        self._sleepers.check_awake()

    def asleep(self) -> Sequence[str]:
        """See `SleepControl`."""
        return self._sleepers.asleep()

    async def sleep(self, level: int) -> None:
        """See `SleepControl`."""
        self.check_sleep(level)
        async with self._lock:
            self._sleepers.check_awake()
            await run_to_completion(self._sleep(level))

    async def wake(self, tags: Sequence[str]) -> None:
        """See `SleepControl`."""
        async with self._lock:
            await run_to_completion(self._wake(self._sleepers.select(tags)))

    # -- inner workings

    async def _sleep(self, level: int) -> None:
        await self._executor.call("sleep", level)
        self._sleepers.tags = {WEIGHTS} if level == 1 else {WEIGHTS, BUFFERS}

    async def _wake(self, tags: set[str]) -> None:
        # Buffers are made when they are needed.
        if WEIGHTS in tags and await self._executor.call("wake"):
            for adapter in self._lending.list_adapters():
                await self._executor.call("load_adapter", adapter.name, adapter.path)
        self._sleepers.tags -= tags


class WorkerRecorder:
    """See `stagemesh.services.engines.profiles.Recorder`: each of an executor's workers writes a file."""

    def __init__(self, executor: Executor, folder: Path) -> None:
        self._executor, self._folder = executor, folder

    async def begin(self, prefix: str, *, max_steps: int | None) -> None:
        """See `Recorder`."""
        await self._executor.call("start_profile", str(self._folder / prefix), max_steps=max_steps)

    async def end(self) -> None:
        """See `Recorder`."""
        await self._executor.call("stop_profile")


class Controls:
    """Of one engine."""

    def __init__(self, executor: Executor, lending: AdapterManager, *, stage: str, profile_dir: str | None) -> None:
        private = Path(private_folder(profile_dir)) if profile_dir else Path()
        self.sleeper = Sleeper(executor, lending, stage=stage)
        self.profiles = Profiles(WorkerRecorder(executor, private), stage=stage, base=profile_dir, private=private)
