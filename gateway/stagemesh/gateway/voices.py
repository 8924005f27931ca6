"""The voices that callers create: audio of a speaker, which pipelines that clone voices speak with."""

import errno
import logging
import os
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import msgspec

from stagemesh.common.errors import ExistsError, InvalidRequestError
from stagemesh.rpc.credentials import write_private

MAX_VOICES = 100
"""The number of voices that a caller may have. Gateways that share a folder may exceed it when they create at once."""
_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9 ._-]{0,62}[A-Za-z0-9_-])?")
_FILE = "voice"
_LINE_END = b"\n"
_ABANDONED_S = 3600.0
"""The age of an incomplete voice, in seconds, from which the process that wrote it is assumed to have ended."""
_TAKEN = frozenset({errno.EEXIST, errno.ENOTEMPTY})
_log = logging.getLogger(__name__)


class Voice(msgspec.Struct, frozen=True):
    """The description of a voice."""

    name: str
    created_s: int
    """The time of its creation, in seconds since 1970."""
    media_type: str
    duration_s: float
    ref_text: str | None = None
    """The text of the audio."""
    consent: str | None = None
    """The caller's reference to the consent of the speaker. The gateway only repeats it."""


class StoredVoice(NamedTuple):
    """A voice with its audio, which is an encoded file."""

    voice: Voice
    audio: bytes


class VoiceStore:
    """Stores voices in a folder. All methods block. Several processes may use the same folder.

    Each owner has a folder, in which each voice has one, with a single file: a line of JSON, and the audio. Folders of
    incomplete and of deleted voices have names that begin with a dot. All methods raise OSError if the folder cannot be
    used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()

    def create(self, owner: str, stored: StoredVoice) -> None:
        """Stores a voice durably. Other processes see it as a whole or not at all.

        Raises ExistsError (VOICE_EXISTS) if the owner has a voice of this name, and InvalidRequestError if the owner
        has too many.
        """
        folder, name = self._folder / owner, stored.voice.name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _remove_abandoned(folder)
        incomplete = Path(tempfile.mkdtemp(dir=folder, prefix="."))
        try:
            write_private(incomplete / _FILE, msgspec.json.encode(stored.voice) + _LINE_END + stored.audio)
            _sync_folder(incomplete)
            with self._lock:
                self._check_count(owner)
                _rename(incomplete, folder / name)
        except BaseException:
            shutil.rmtree(incomplete, ignore_errors=True)
            raise
        for each in (folder, self._folder):
            _sync_folder(each)

    def list_voices(self, owner: str) -> list[Voice]:
        """Returns the voices of an owner, the oldest first."""
        found = (_read(path, with_audio=False) for path in self._voices(owner))
        voices = (each.voice for each in found if each is not None)
        return sorted(voices, key=lambda each: (each.created_s, each.name))

    def read(self, owner: str, name: str) -> StoredVoice | None:
        """Returns a voice of an owner, or None if there is none of this name."""
        return _read(self._folder / owner / name, with_audio=True) if is_voice_name(name) else None

    def delete(self, owner: str, name: str) -> bool:
        """Deletes a voice of an owner. Returns whether there was one of this name."""
        if not is_voice_name(name):
            return False
        folder = self._folder / owner
        deleted = folder / f".{uuid4().hex}"
        try:
            (folder / name).rename(deleted)
        except FileNotFoundError:
            return False
        _sync_folder(folder)
        shutil.rmtree(deleted, ignore_errors=True)
        return True

    # -- internals

    def _voices(self, owner: str) -> Sequence[Path]:
        try:
            return [path for path in (self._folder / owner).iterdir() if is_voice_name(path.name)]
        except FileNotFoundError:
            return ()

    def _check_count(self, owner: str) -> None:
        if len(self._voices(owner)) >= MAX_VOICES:
            raise InvalidRequestError(f"you have {MAX_VOICES} voices, which is the limit; delete one first")


def is_voice_name(text: str) -> bool:
    """Returns whether a text can be the name of a created voice: 1 to 64 letters, digits, spaces and "._-" of ASCII.

    The first character is a letter or a digit, and the last one neither a space nor a dot.
    """
    return _NAME.fullmatch(text) is not None


def _read(path: Path, *, with_audio: bool) -> StoredVoice | None:
    """Returns the voice in a folder, without its audio if the audio is not wanted. None if it does not exist."""
    try:
        with (path / _FILE).open("rb") as file:
            voice = msgspec.json.decode(file.readline(), type=Voice)
            return StoredVoice(voice, file.read() if with_audio else b"")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except msgspec.DecodeError:
        _log.warning("%s is damaged; delete the voice", path)
        return None


def _rename(incomplete: Path, path: Path) -> None:
    try:
        # A folder replaces no folder that contains a file.
        incomplete.rename(path)
    except OSError as exc:
        if exc.errno in _TAKEN:
            raise ExistsError(
                f"you have a voice {path.name!r} already; delete it first, or use another name", reason="VOICE_EXISTS"
            ) from exc
        raise


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(".*"):
        with suppress(FileNotFoundError):
            if path.stat().st_mtime < time.time() - _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
