"""Authentication of callers by certificate or by bearer token, and the file with the digests of tokens."""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stagemesh.common.errors import InvalidRequestError, UnauthenticatedError, file_access
from stagemesh.common.process.config import TokenConfig
from stagemesh.rpc.callers import CLIENT, SCHEME, Identity, identity_of_certificate
from stagemesh.rpc.credentials import file_version, write_private
from stagemesh.rpc.interceptors import Metadata

if TYPE_CHECKING:
    import jwt


_log = logging.getLogger(__name__)


class TokenEntry(NamedTuple):
    """The caller that a token identifies, and the time at which the token expires, or None if it does not expire."""

    caller: str
    expires: datetime | None = None


class TokenDigests:
    """The digests of tokens in a file. The file is read again after it has changed.

    No token is valid while the file is missing or damaged. Otherwise a token that was revoked would remain valid.
    """

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
            if self._entries:
                _log.error("no token of the file is valid: %s", exc.message)
            self._version, self._entries = (), {}
        # The token itself is not compared, so that the time of the search discloses nothing about valid tokens.
        entry = self._entries.get(_digest(token))
        if entry is None or (entry.expires is not None and datetime.now(UTC) >= entry.expires):
            return None
        return entry.caller

    def _refresh(self) -> None:
        with file_access(f"{self._path} cannot be read", reason="INVALID_TOKENS"):
            version = file_version(self._path)
            if version != self._version:
                self._entries, self._version = _read(self._path), version


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


_HEADER, _PREFIX = "authorization", "Bearer "
_MAX_TOKEN_LENGTH = 8192
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""The accepted signatures of JWTs. They are asymmetric, so that a public key is not accepted as a shared secret."""
_KEYS_LIFE_S, _KEYS_LIMIT_S = 300.0, 600.0
"""The age in seconds at which the keys of a provider are fetched again, and the age at which they are no longer valid.

A key that the provider has withdrawn is therefore valid for at most `_KEYS_LIMIT_S`, even if no client has called or
the provider has not answered in the meantime.
"""
_FETCH_PAUSE_S = 10.0
"""The minimum time between two requests for the keys of a provider, which tokens with unknown keys cause."""
_FETCH_TIMEOUT_S = 5.0
_LEEWAY_S = 10.0
"""The tolerated difference between the clocks of this host and of the provider, in seconds."""


async def by_certificate(context: Any, metadata: Metadata) -> Identity:  # noqa: ARG001
    """Returns the identity in the caller's certificate. Raises UnauthenticatedError (UNKNOWN_IDENTITY) if it has none.

    Is an `Authenticate`.
    """
    identity = identity_of_certificate(context.auth_context())
    if identity is None:
        raise UnauthenticatedError(
            f"the caller's certificate has no name of the form {SCHEME}ROLE/NAME; use another certificate",
            reason="UNKNOWN_IDENTITY",
        )
    return identity


class TokenChecker:
    """Checks the tokens of clients. A token is random text whose digest is in a file, or a JWT of a provider."""

    def __init__(self, config: TokenConfig) -> None:
        """Reads the file, and the keys if they are a file.

        Raises InvalidRequestError (INVALID_TOKENS) if one of them cannot be read or is damaged.
        """
        self._file = TokenDigests(Path(config.file)) if config.file else None
        self._provider = _Provider(config) if config.keys else None

    async def authenticate(self, context: Any, metadata: Metadata) -> Identity:  # noqa: ARG002
        """Returns the identity of the client with the token in the metadata of an RPC. Is an `Authenticate`.

        Raises UnauthenticatedError: NO_TOKEN if there is none, INVALID_TOKEN if it is not valid.
        """
        return Identity([(CLIENT, await self.find_caller(_bearer_token(metadata)))])

    async def find_caller(self, token: str) -> str:
        """Returns the caller with this token.

        Raises UnauthenticatedError (INVALID_TOKEN) if the token is unknown, expired, revoked or not valid here.
        """
        if self._file is not None and (caller := self._file.find_caller(token)) is not None:
            return caller
        if self._provider is None:
            raise _invalid_token("it is unknown, expired or revoked")
        return await self._provider.find_caller(token)


class _Provider:
    """An identity provider that issues JWTs. Its keys are fetched again when they are old, or a token names another."""

    def __init__(self, config: TokenConfig) -> None:
        # Most ports accept no tokens of a provider. Every extra with a server installs the package.
        import jwt

        self._jwt, self._config = jwt, config
        self._is_remote = config.keys.startswith("https://")
        self._keys: Mapping[str | None, jwt.PyJWK] = {} if self._is_remote else self._read_keys()
        self._read_s = time.monotonic() - (_KEYS_LIMIT_S if self._is_remote else 0.0)
        """The time at which the present keys were requested."""
        self._fetched_s = self._read_s
        """The time at which the last request for the keys ended."""
        self._fetching: asyncio.Task[None] | None = None

    async def find_caller(self, token: str) -> str:
        """Returns the caller with this token. Raises UnauthenticatedError (INVALID_TOKEN) if the token is not valid."""
        try:
            key = await self._find_key(self._jwt.get_unverified_header(token).get("kid"))
            claims = self._jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                issuer=self._config.issuer,
                audience=self._config.audience,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except self._jwt.PyJWTError as exc:
            raise _invalid_token(str(exc)) from exc
        caller = claims.get(self._config.caller_claim)
        if not isinstance(caller, str) or not caller:
            raise _invalid_token(f"it has no claim {self._config.caller_claim!r}")
        return caller

    async def _find_key(self, name: str | None) -> "jwt.PyJWK":
        """Returns the key with this name. Raises InvalidTokenError if the provider has no such key.

        Callers with a known key do not wait until the keys are fetched, unless the known keys are no longer valid.
        """
        if time.monotonic() - self._read_s >= _KEYS_LIMIT_S:
            self._keys = {}
        is_known = name in self._keys
        if self._fetching is None and time.monotonic() - self._fetched_s >= (
            _KEYS_LIFE_S if is_known else _FETCH_PAUSE_S
        ):
            self._fetching = asyncio.create_task(self._fetch(), name="fetch keys")
        if not is_known and self._fetching is not None:
            await asyncio.shield(self._fetching)
        if name not in self._keys:
            raise self._jwt.InvalidTokenError("its key is not one of the provider's")
        return self._keys[name]

    async def _fetch(self) -> None:
        began_s = time.monotonic()
        try:
            self._keys, self._read_s = await asyncio.to_thread(self._read_keys), began_s
        except InvalidRequestError as exc:
            left_s = max(0.0, self._read_s + _KEYS_LIMIT_S - time.monotonic())
            _log.warning("the previous keys remain valid for %.0f s: %s", left_s, exc.message)
        finally:
            self._fetched_s, self._fetching = time.monotonic(), None

    def _read_keys(self) -> "Mapping[str | None, jwt.PyJWK]":
        """Raises InvalidRequestError (INVALID_TOKENS) if the keys cannot be read or are damaged."""
        try:
            if self._is_remote:
                found = self._jwt.PyJWKClient(self._config.keys, timeout=_FETCH_TIMEOUT_S).get_jwk_set(refresh=True)
            else:
                found = self._jwt.PyJWKSet.from_json(Path(self._config.keys).read_text())
        except (OSError, ValueError, TypeError, AttributeError, self._jwt.PyJWTError) as exc:
            raise InvalidRequestError(
                f"the keys {self._config.keys} cannot be read: {exc}", reason="INVALID_TOKENS"
            ) from exc
        return {key.key_id: key for key in found.keys}


def _bearer_token(metadata: Metadata) -> str:
    values = [value for key, value in metadata or () if key == _HEADER]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0].startswith(_PREFIX):
        raise UnauthenticatedError(
            "the call has no token; send the metadata `authorization: Bearer TOKEN` (`--token-file`)", reason="NO_TOKEN"
        )
    token = values[0].removeprefix(_PREFIX)
    if len(token) > _MAX_TOKEN_LENGTH:
        raise _invalid_token(f"it is longer than {_MAX_TOKEN_LENGTH} characters")
    return token


def _invalid_token(problem: str) -> UnauthenticatedError:
    return UnauthenticatedError(f"the token is not valid: {problem}; use a new token", reason="INVALID_TOKEN")
