"""Operator controls that several engines share: profiles, sleep, and calls that complete even if cancelled."""

import asyncio
import shutil
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from secrets import token_hex
from typing import Any, TypeVar

from stagemesh.common.errors import InvalidRequestError, NotReadyError, file_access

T = TypeVar("T")


async def run_to_completion(work: Coroutine[Any, Any, T]) -> T:
    """Runs a coroutine to its end and returns its result.

    If the caller is cancelled, the coroutine still runs to its end. CancelledError is raised afterwards.
    """
    task = asyncio.ensure_future(work)
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as exc:
            cancelled = exc
    if cancelled is not None:
        # The exception is retrieved, so that asyncio does not log it as never retrieved.
        task.exception()
        raise cancelled
    return task.result()


class SleepManager(ABC):
    """Puts an engine to sleep and wakes it. Implements `abilities.SleepControl`."""

    def __init__(self, *, stage: str) -> None:
        self._stage = stage
        self._lock = asyncio.Lock()
        self._tags = set[str]()
        """The tags of the parts that are asleep."""

    def asleep(self) -> Sequence[str]:
        return sorted(self._tags)

    def check_awake(self) -> None:
        """Raises NotReadyError if any part of the engine is asleep."""
        if self._tags:
            raise NotReadyError(
                f"the engine of stage {self._stage} is asleep ({', '.join(self.asleep())}); wake it first",
                metadata={"asleep": ",".join(self.asleep())},
            )

    def check_sleep(self, level: int) -> None:
        if level not in {1, 2}:
            raise InvalidRequestError(f"level is {level}; it must be 1 (frees the memory of the weights) or 2 (all)")

    async def sleep(self, level: int) -> None:
        self.check_sleep(level)
        async with self._lock:
            self.check_awake()
            await run_to_completion(self._sleep(level))

    async def wake(self, tags: Sequence[str]) -> None:
        async with self._lock:
            wanted = set(tags) or set(self._tags)
            if not wanted <= self._tags:
                raise InvalidRequestError(
                    f"stage {self._stage}: {', '.join(sorted(wanted - self._tags))} is not asleep; asleep: "
                    f"{', '.join(self.asleep()) or 'nothing'}",
                    reason="UNKNOWN_TAG",
                )
            if wanted:
                await run_to_completion(self._wake(wanted))

    # -- to be implemented by an engine

    @abstractmethod
    async def _engine_sleep(self, level: int) -> set[str]:
        """Puts the engine to sleep at this level. Returns the tags of the parts that are now asleep."""

    @abstractmethod
    async def _engine_wake(self, tags: set[str]) -> None:
        """Wakes the parts of the engine with these tags. All of these parts are asleep."""

    # -- internal

    async def _sleep(self, level: int) -> None:
        self._tags = await self._engine_sleep(level)

    async def _wake(self, tags: set[str]) -> None:
        await self._engine_wake(tags)
        self._tags -= tags


def private_folder(base: str) -> str:
    """Returns a new path of a hidden folder in `base` into which a profiler can write. Does not create the folder."""
    return str(Path(base) / f".profile-{token_hex(8)}")


class Profiles:
    """Starts and stops profiles of an engine. At most one profile runs at a time.

    The engine's profiler writes its files into the folder `private`. When a profile is stopped, its files are moved to
    the folder that the caller has named. This folder must be within `base`. Profiles are disabled if `base` is None.
    """

    def __init__(
        self,
        begin: Callable[[str, int | None], Awaitable[object]],
        end: Callable[[], Awaitable[object]],
        *,
        stage: str,
        base: str | None,
        private: Path,
    ) -> None:
        """Creates the control.

        Args:
            begin: Starts the engine's profiler. Its arguments are the start of the files' names, and the number of
                steps after which the recording ends, or None if it ends only in `end`.
            end: Stops the engine's profiler and waits until all files are written.
            stage: The name of the stage, for messages.
            base: The folder that contains the folders of all profiles, or None.
            private: The folder into which the engine's profiler writes.
        """
        self._begin, self._end = begin, end
        self._stage, self._private = stage, private
        self._base = Path(base).resolve() if base else None
        self._target: Path | None = None
        self._lock = asyncio.Lock()

    async def start(self, folder: str, *, max_steps: int | None) -> str:
        """Starts a profile. Returns the absolute path of the folder that will contain the profile's files.

        `folder` is relative to `base`, or an absolute path within `base`. Recording ends after `max_steps` steps, or
        only in `stop` if `max_steps` is None. Raises InvalidRequestError if the folder is outside `base`, and
        NotReadyError if a profile is already running or profiles are disabled.
        """
        async with self._lock:
            if self._target is not None:
                raise NotReadyError(
                    f"stage {self._stage} already records a profile into {self._target}; stop that profile first",
                    reason="PROFILE_RUNNING",
                )
            target = self._checked(folder)
            await run_to_completion(self._start(target, max_steps))
            return str(target)

    async def stop(self) -> list[str]:
        """Stops the running profile. Returns the paths of the profile's files, sorted by name.

        Raises NotReadyError if no profile is running.
        """
        async with self._lock:
            if self._target is None:
                raise NotReadyError(f"stage {self._stage} records no profile; start one first", reason="NO_PROFILE")
            return await run_to_completion(self._stop(self._target))

    def discard(self) -> None:
        """Deletes the files of a profile that was started but not stopped. Does nothing if no profile is running."""
        if self._target is not None:
            shutil.rmtree(self._private, ignore_errors=True)

    # -- internal

    def _checked(self, folder: str) -> Path:
        if self._base is None:
            raise NotReadyError(
                f"stage {self._stage} records no profiles; start it with the option profile_dir, "
                "the folder for profiles",
                reason="PROFILES_DISABLED",
            )
        # The path is resolved, so that ".." and symbolic links cannot lead outside the folder.
        target = (self._base / folder).resolve()
        if not target.is_relative_to(self._base):
            raise InvalidRequestError(
                f"folder {folder!r} is outside {self._base}, the profile_dir of stage {self._stage}; choose one in it",
                reason="INVALID_FOLDER",
            )
        return target

    async def _start(self, target: Path, max_steps: int | None) -> None:
        with file_access(f"folder {target} cannot be created", reason="INVALID_FOLDER"):
            for folder in (self._private, target):
                await asyncio.to_thread(folder.mkdir, parents=True, exist_ok=True)
        # A random prefix prevents name collisions with files in the target folder.
        await self._begin(f"profile-{token_hex(4)}", max_steps)
        self._target = target

    async def _stop(self, target: Path) -> list[str]:
        await self._end()
        try:
            # The folder is checked again, because a symbolic link may have replaced it.
            target = self._checked(str(target))
            with file_access(f"the profile cannot be moved to {target}", reason="INVALID_FOLDER"):
                return await asyncio.to_thread(self._move, target)
        finally:
            self.discard()
            self._target = None

    def _move(self, target: Path) -> list[str]:
        target.mkdir(parents=True, exist_ok=True)
        return [str(shutil.move(file, target / file.name)) for file in sorted(self._private.iterdir())]
