"""The file with the tokens of clients. It contains digests, so that a copy of the file does not disclose a token."""

import hashlib
import json
import logging
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.private_files import write_private
from stagemesh.rpc.credentials import file_version

_log = logging.getLogger(__name__)


class TokenEntry(NamedTuple):
    """The caller that a token identifies, and the time at which the token expires, or None if it does not expire."""

    caller: str
    expires: datetime | None = None


class TokenFile:
    """The tokens in a file. The file is read again after it has changed."""

    def __init__(self, path: Path) -> None:
        """Reads the file. Raises InvalidRequestError (INVALID_TOKENS) if it cannot be read or is damaged."""
        self._path = path
        self._version: tuple[int, ...] = ()
        self._entries: Mapping[str, TokenEntry] = {}
        self._refresh()

    def find_caller(self, token: str) -> str | None:
        """Returns the caller with this token, or None if the token is not in the file or has expired."""
        try:
            self._refresh()
        except InvalidRequestError as exc:
            _log.error("the previous tokens remain valid: %s", exc.message)
        # The token itself is not compared, so that the time of the search discloses nothing about valid tokens.
        entry = self._entries.get(_digest(token))
        if entry is None or (entry.expires is not None and datetime.now(UTC) >= entry.expires):
            return None
        return entry.caller

    def _refresh(self) -> None:
        try:
            version = file_version(self._path)
            if version != self._version:
                # A damaged file is reported once, not for each call.
                self._version = version
                self._entries = _read(self._path)
        except OSError as exc:
            raise InvalidRequestError(f"{self._path} cannot be read: {exc.strerror}", reason="INVALID_TOKENS") from exc


def add_token(path: Path, token: str, entry: TokenEntry) -> None:
    """Adds a token to the file at `path`, or creates the file.

    Raises InvalidRequestError (INVALID_TOKENS) if the file is damaged, and OSError if it cannot be read or written.
    """
    entries = {**(_read(path) if path.exists() else {}), _digest(token): entry}
    tokens = [
        {"caller": each.caller, "sha256": digest, "expires": each.expires.isoformat() if each.expires else None}
        for digest, each in entries.items()
    ]
    write_private(path, f"{json.dumps({'tokens': tokens}, indent=2)}\n".encode())


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


def _read(path: Path) -> dict[str, TokenEntry]:
    try:
        tokens = json.loads(path.read_bytes())["tokens"]
        return {
            str(each["sha256"]): TokenEntry(str(each["caller"]), _read_time(each.get("expires"))) for each in tokens
        }
    except (ValueError, TypeError, KeyError, AttributeError) as exc:
        raise InvalidRequestError(f"{path} is damaged: {exc}", reason="INVALID_TOKENS") from exc


def _read_time(text: str | None) -> datetime | None:
    if not text:
        return None
    time = datetime.fromisoformat(text)
    if time.tzinfo is None:
        raise ValueError(f"the time {text} has no time zone")
    return time
