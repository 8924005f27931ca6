"""Recordings of what an engine computes, made in a private folder and then moved to where the caller wants them."""

import asyncio
import shutil
from pathlib import Path
from secrets import token_hex
from typing import Protocol

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.services.engines.cleanup import to_the_end


class Recorder(Protocol):
    """Whoever records, into a folder that it knows."""

    async def begin(self, prefix: str, *, max_steps: int | None) -> None:
        """Begins, and ends by itself after `max_steps`. Its files' names begin with `prefix`."""

    async def end(self) -> None:
        """Ends, and returns when all files are written."""


def private_folder(base: str) -> str:
    """Where a recorder is to write until the recording is moved; a hidden folder of `base`."""
    return str(Path(base) / f".profile-{token_hex(8)}")


class Profiles:
    """Starts and stops recordings, one at a time.

    `base` is the only place where a caller may have files put, `private` that where the recorder writes them.
    """

    def __init__(self, recorder: Recorder, *, stage: str, base: str | None, private: Path) -> None:
        self._recorder, self._stage, self._private = recorder, stage, private
        self._base = Path(base).resolve() if base else None
        self._target: Path | None = None
        self._lock = asyncio.Lock()

    async def start(self, folder: str, *, max_steps: int | None) -> str:
        """See `ProfileControl`."""
        async with self._lock:
            if self._target is not None:
                raise NotReadyError(
                    f"stage {self._stage} records into {self._target} already; stop that first",
                    reason="PROFILE_RUNNING",
                )
            target = self._checked(folder)
            await to_the_end(self._start(target, max_steps))
            return str(target)

    async def stop(self) -> list[str]:
        """See `ProfileControl`."""
        async with self._lock:
            if self._target is None:
                raise NotReadyError(f"stage {self._stage} records nothing; start a profile first", reason="NO_PROFILE")
            return await to_the_end(self._stop(self._target))

    def discard(self) -> None:
        """Removes what a recording that was never stopped has left."""
        if self._target is not None:
            shutil.rmtree(self._private, ignore_errors=True)

    # -- inner workings

    def _checked(self, folder: str) -> Path:
        if self._base is None:
            raise NotReadyError(
                f"stage {self._stage} makes no profiles; start it with the option profile_dir, the folder that they "
                "may be put into",
                reason="PROFILES_DISABLED",
            )
        # Resolved: neither ".." nor a link leads out.
        target = (self._base / folder).resolve()
        if not target.is_relative_to(self._base):
            raise InvalidRequestError(
                f"folder {folder!r} is outside {self._base}, the profile_dir of stage {self._stage}; choose one within",
                reason="INVALID_FOLDER",
            )
        return target

    async def _start(self, target: Path, max_steps: int | None) -> None:
        try:
            await asyncio.to_thread(self._make_folders, target)
        except OSError as exc:
            raise InvalidRequestError(
                f"folder {target} cannot be made: {exc.strerror}", reason="INVALID_FOLDER"
            ) from exc
        # A prefix of its own: nothing that lies in the target has the same name.
        await self._recorder.begin(f"profile-{token_hex(4)}", max_steps=max_steps)
        self._target = target

    def _make_folders(self, target: Path) -> None:
        self._private.mkdir(parents=True, exist_ok=True)
        target.mkdir(parents=True, exist_ok=True)

    async def _stop(self, target: Path) -> list[str]:
        await self._recorder.end()
        try:
            # Checked again: what was a folder may be a link by now.
            target = self._checked(str(target))
            return await asyncio.to_thread(self._move, target)
        except OSError as exc:
            raise NotReadyError(f"the profile cannot be put into {target}: {exc}", reason="INVALID_FOLDER") from exc
        finally:
            self.discard()
            self._target = None

    def _move(self, target: Path) -> list[str]:
        target.mkdir(parents=True, exist_ok=True)
        return [str(shutil.move(file, target / file.name)) for file in sorted(self._private.iterdir())]
