"""Authentication of callers: by the certificate of the connection, or by a bearer token in the metadata of the call."""

import asyncio
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from stagemesh.common.errors import InvalidRequestError, UnauthenticatedError
from stagemesh.common.token_config import TokenConfig
from stagemesh.rpc.callers import SCHEME, Identity, identity_of_certificate, set_identity
from stagemesh.rpc.credentials import file_version
from stagemesh.rpc.roles import CLIENT, Authenticate, Role

if TYPE_CHECKING:
    import jwt

_Metadata: TypeAlias = Iterable[tuple[str, str | bytes]] | None

_HEADER, _PREFIX = "authorization", "Bearer "
_MAX_TOKEN_BYTES = 8192
_ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "ES256", "ES384", "EdDSA")
"""The accepted signatures of JWTs. They are asymmetric: a public key cannot serve as a secret."""
_KEYS_LIFE_S = 300.0
_FETCH_PAUSE_S = 10.0
"""The minimum time between two requests for the keys of a provider. Callers could otherwise flood it with requests."""
_FETCH_TIMEOUT_S = 5.0
_LEEWAY_S = 10.0
"""The tolerated difference between the clocks of this host and of the provider, in seconds."""

_log = logging.getLogger(__name__)


def authentication(tokens: "TokenChecker | None") -> Authenticate:
    """Returns the function that authenticates the callers of a port: by tokens, or by certificates if it is None."""

    async def by_certificate(context: Any, metadata: _Metadata) -> frozenset[Role]:  # noqa: ARG001
        identity = identity_of_certificate(context)
        if identity is None:
            raise UnauthenticatedError(
                f"the caller's certificate has no name of the form {SCHEME}ROLE/NAME; use another certificate",
                reason="UNKNOWN_IDENTITY",
            )
        set_identity(identity)
        return identity.roles

    async def by_token(context: Any, metadata: _Metadata) -> frozenset[Role]:  # noqa: ARG001
        assert tokens is not None, "the port accepts tokens"
        identity = Identity([(CLIENT, await tokens.caller(_bearer_token(metadata)))])
        set_identity(identity)
        return identity.roles

    return by_certificate if tokens is None else by_token


class TokenChecker:
    """Checks the tokens of clients. A token is random text whose digest is in a file, or a JWT of a provider."""

    def __init__(self, config: TokenConfig) -> None:
        """Reads the file and the keys. Raises InvalidRequestError (INVALID_TOKENS) if they are damaged."""
        self._file = _TokenFile(Path(config.file)) if config.file else None
        self._provider = _Provider(config) if config.keys else None

    async def caller(self, token: str) -> str:
        """Returns the name of the caller that has this token. Raises UnauthenticatedError if no caller has it."""
        if self._file is not None and (caller := self._file.find(token)) is not None:
            return caller
        if self._provider is None:
            raise _invalid_token("it is unknown, has expired, or was revoked")
        return await self._provider.check(token)


@dataclass(frozen=True)
class _Entry:
    caller: str
    expires: datetime | None


class _TokenFile:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._version: tuple[int, ...] = ()
        self._entries: Mapping[str, _Entry] = {}
        self._read()

    def find(self, token: str) -> str | None:
        """Returns the caller with this token, or None if it is not in the file or has expired."""
        try:
            self._read()
        except InvalidRequestError as exc:
            _log.error("the former tokens remain valid: %s", exc.message)
        # A digest is looked up, so that the time does not depend on the contents of valid tokens.
        entry = self._entries.get(token_digest(token))
        if entry is None or (entry.expires is not None and datetime.now(UTC) >= entry.expires):
            return None
        return entry.caller

    def _read(self) -> None:
        try:
            version = file_version(self._path)
            if version == self._version:
                return
            self._version = version
            self._entries = {digest: _Entry(*each) for digest, each in read_token_file(self._path).items()}
        except OSError as exc:
            raise _invalid_file(self._path, f"cannot be read: {exc.strerror}") from exc


def token_digest(token: str) -> str:
    """Returns the digest of a token. The file contains digests, so that a copy of it is of no use to a thief."""
    return hashlib.sha256(token.encode()).hexdigest()


def read_token_file(path: Path) -> dict[str, tuple[str, datetime | None]]:
    """Returns the caller and the time of expiry of each token in a file, by the digest of the token.

    Raises OSError if the file cannot be read, and InvalidRequestError (INVALID_TOKENS) if it is damaged.
    """
    try:
        entries = json.loads(path.read_bytes())["tokens"]
        found = {str(each["sha256"]): (str(each["caller"]), _read_expiry(each.get("expires"))) for each in entries}
    except (ValueError, TypeError, KeyError) as exc:
        raise _invalid_file(path, f"is damaged: {exc}") from exc
    return found


def _read_expiry(text: str | None) -> datetime | None:
    if not text:
        return None
    expires = datetime.fromisoformat(text)
    if expires.tzinfo is None:
        raise ValueError(f"the time {text} has no time zone")
    return expires


class _Provider:
    """An identity provider that issues JWTs. Its keys are fetched again when a token names an unknown one."""

    def __init__(self, config: TokenConfig) -> None:
        try:
            import jwt
        except ImportError as exc:
            raise InvalidRequestError(
                "tokens of an identity provider need PyJWT: pip install 'stagemesh[stage]'", reason="INVALID_TOKENS"
            ) from exc
        self._jwt, self._config = jwt, config
        self._keys: Mapping[str | None, jwt.PyJWK] = {}
        self._fetched_s = -_FETCH_PAUSE_S
        self._fetching = asyncio.Lock()
        self._renewing: asyncio.Task[None] | None = None
        if not config.keys.startswith("https://"):
            self._take(_read_keys(Path(config.keys)))

    async def check(self, token: str) -> str:
        """Returns the caller of a valid token. Raises UnauthenticatedError if the token is not valid."""
        try:
            key = await self._key(self._jwt.get_unverified_header(token).get("kid"))
            claims = self._jwt.decode(
                token,
                key,
                algorithms=_ALGORITHMS,
                issuer=self._config.issuer,
                audience=self._config.audience,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iss", "aud"]},
            )
        except self._jwt.InvalidTokenError as exc:
            raise _invalid_token(str(exc)) from exc
        caller = claims.get(self._config.caller_claim)
        if not isinstance(caller, str) or not caller:
            raise _invalid_token(f"it has no claim {self._config.caller_claim!r}")
        return caller

    async def _key(self, name: str | None) -> "jwt.PyJWK":
        """Returns the key with this name. Raises InvalidTokenError if the provider has no such key."""
        if name not in self._keys:
            async with self._fetching:
                await self._fetch(after_s=_FETCH_PAUSE_S)
        elif time.monotonic() - self._fetched_s >= _KEYS_LIFE_S:
            # Callers with known keys do not wait for the provider.
            self._renewing = asyncio.create_task(self._fetch(after_s=_KEYS_LIFE_S), name="fetch keys")
        if name not in self._keys:
            raise self._jwt.InvalidTokenError("its key is not one of the provider's")
        return self._keys[name]

    async def _fetch(self, *, after_s: float) -> None:
        """Fetches the keys if `after_s` seconds have passed since they were last fetched."""
        if time.monotonic() - self._fetched_s < after_s:
            return
        self._fetched_s = time.monotonic()
        # An unreachable provider does not make the keys invalid that it has published before.
        with suppress(InvalidRequestError):
            self._take(await asyncio.to_thread(_read_keys, self._config.keys))

    def _take(self, document: dict[str, Any]) -> None:
        try:
            self._keys = {key.key_id: key for key in self._jwt.PyJWKSet.from_dict(document).keys}
        except self._jwt.PyJWTError as exc:
            raise _invalid_file(self._config.keys, f"is not a JSON Web Key Set: {exc}") from exc


def _read_keys(source: Path | str) -> dict[str, Any]:
    document: dict[str, Any]
    from urllib.request import urlopen

    try:
        if isinstance(source, str) and source.startswith("https://"):
            with urlopen(source, timeout=_FETCH_TIMEOUT_S) as answer:  # noqa: S310 - the scheme is checked
                content = answer.read()
        else:
            content = Path(source).read_bytes()
        document = dict(json.loads(content))
    except (OSError, ValueError, TypeError) as exc:
        _log.warning("the keys %s cannot be read: %s", source, exc)
        raise _invalid_file(source, f"cannot be read: {exc}") from exc
    return document


def _bearer_token(metadata: _Metadata) -> str:
    values = [value for key, value in metadata or () if key == _HEADER]
    if len(values) != 1 or not isinstance(values[0], str) or not values[0].startswith(_PREFIX):
        raise UnauthenticatedError(
            "the call has no token; send the metadata `authorization: Bearer TOKEN` (`--token-file`)",
            reason="NO_TOKEN",
        )
    token = values[0].removeprefix(_PREFIX)
    if len(token) > _MAX_TOKEN_BYTES:
        raise _invalid_token(f"it is longer than {_MAX_TOKEN_BYTES} characters")
    return token


def _invalid_token(problem: str) -> UnauthenticatedError:
    return UnauthenticatedError(f"the token is not valid: {problem}; get a new one", reason="INVALID_TOKEN")


def _invalid_file(path: Path | str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"{path} {problem}", reason="INVALID_TOKENS")
