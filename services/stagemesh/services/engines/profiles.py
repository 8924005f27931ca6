"""Profiles of an engine. A profile is recorded in a private folder, then moved to the folder that the caller named."""

import asyncio
import shutil
from pathlib import Path
from secrets import token_hex
from typing import Protocol

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.services.engines.cleanup import run_to_completion


class Recorder(Protocol):
    """The interface of an engine's profiler, which writes its files into a private folder."""

    async def begin(self, prefix: str, *, max_steps: int | None) -> None:
        """Starts recording. The file names start with `prefix`.

        Recording ends after `max_steps` steps. If `max_steps` is None, only `end` ends recording.
        """

    async def end(self) -> None:
        """Stops recording and waits until all files are written."""


def private_folder(base: str) -> str:
    """Returns a new path for a hidden folder in `base`, into which a recorder writes. Does not create the folder."""
    return str(Path(base) / f".profile-{token_hex(8)}")


class Profiles:
    """Starts and stops profiles, one at a time. The recorder writes into `private`.

    Callers may name only folders within `base`. If `base` is None, profiles are disabled.
    """

    def __init__(self, recorder: Recorder, *, stage: str, base: str | None, private: Path) -> None:
        self._recorder, self._stage, self._private = recorder, stage, private
        self._base = Path(base).resolve() if base else None
        self._target: Path | None = None
        self._lock = asyncio.Lock()

    async def start(self, folder: str, *, max_steps: int | None) -> str:
        """Starts a profile. Returns the absolute path of the folder that will contain the profile's files.

        Recording ends after `max_steps` steps. If `max_steps` is None, only `stop` ends recording. Raises
        InvalidRequestError if the folder is outside `base`, and NotReadyError if a profile is already running.
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
        """Stops the profile and returns the paths of its files. Raises NotReadyError if no profile is running."""
        async with self._lock:
            if self._target is None:
                raise NotReadyError(f"stage {self._stage} records no profile; start one first", reason="NO_PROFILE")
            return await run_to_completion(self._stop(self._target))

    def discard(self) -> None:
        """Deletes the files of a profile that was not stopped. Does nothing if no profile is running."""
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
        try:
            await asyncio.to_thread(self._make_folders, target)
        except OSError as exc:
            raise InvalidRequestError(
                f"folder {target} cannot be created: {exc.strerror}", reason="INVALID_FOLDER"
            ) from exc
        # A random prefix prevents name collisions with files in the target folder.
        await self._recorder.begin(f"profile-{token_hex(4)}", max_steps=max_steps)
        self._target = target

    def _make_folders(self, target: Path) -> None:
        self._private.mkdir(parents=True, exist_ok=True)
        target.mkdir(parents=True, exist_ok=True)

    async def _stop(self, target: Path) -> list[str]:
        await self._recorder.end()
        try:
            # The folder is checked again, because a symbolic link may have replaced it.
            target = self._checked(str(target))
            return await asyncio.to_thread(self._move, target)
        except OSError as exc:
            raise NotReadyError(f"the profile cannot be moved to {target}: {exc}", reason="INVALID_FOLDER") from exc
        finally:
            self.discard()
            self._target = None

    def _move(self, target: Path) -> list[str]:
        target.mkdir(parents=True, exist_ok=True)
        return [str(shutil.move(file, target / file.name)) for file in sorted(self._private.iterdir())]
