"""The caller of a request: from a certificate, from a token, and without credentials."""

import json
import re
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa

from stagemesh.common.errors import InvalidRequestError, PermissionDeniedError, StagemeshError, UnauthenticatedError
from stagemesh.common.process.config import TokenConfig, dump_config, load_config
from stagemesh.common.process.media_config import MediaConfig, MediaServiceConfig
from stagemesh.orchestrator.config import OrchestratorConfig
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.servicer import OrchestratorServicer, add_orchestrator_service
from stagemesh.rpc import authentication
from stagemesh.rpc.authentication import TokenChecker, TokenEntry, add_token
from stagemesh.rpc.callers import CLIENT
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.credentials import TlsFolder
from stagemesh.rpc.server import Server
from stagemesh.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from tests.credentials import issue, process_credentials
from tests.rpc.call_errors import error_of, raises

if TYPE_CHECKING:
    from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceAsyncStub

ISSUER, AUDIENCE = "https://id.example", "stagemesh"


@dataclass
class Callers:
    """An orchestrator that records the callers of requests and produces no outputs."""

    seen: list[str] = field(default_factory=list[str])

    async def generate(
        self, request: orchestrator_pb2.GenerateRequest, *, time_left_s: float | None
    ) -> AsyncGenerator[bytes]:
        self.seen.append(request.caller)
        return _nothing()


async def _nothing() -> AsyncGenerator[bytes]:
    for event in list[bytes]():
        yield event


@asynccontextmanager
async def _orchestrator(
    callers: Callers,
    *,
    own: Path | None,
    client: Path | None,
    token: Path | None = None,
    tokens: TokenConfig | None = None,
) -> "AsyncGenerator[OrchestratorServiceAsyncStub]":
    """Serves with the certificates in `own`, and yields the stub of a client with those in `client`."""
    with process_credentials(own):
        server = Server("127.0.0.1:0", roles={CLIENT}, tokens=TokenChecker(tokens) if tokens else None)
        add_orchestrator_service(
            OrchestratorServicer(cast("Orchestrator", callers), cast("OrchestratorConfig", None)), server.grpc
        )
        port = await server.start()
    with process_credentials(client, token_file=token):
        channel = open_channel(f"localhost:{port}")
    try:
        async with channel:
            yield orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    finally:
        await server.stop(grace_s=0)


async def _generate(stub: "OrchestratorServiceAsyncStub", caller: str = "") -> None:
    async for _ in stub.Generate(orchestrator_pb2.GenerateRequest(caller=caller), timeout=20):
        pass


async def _check_refusal(
    stub: "OrchestratorServiceAsyncStub", kind: type[StagemeshError], reason: str, said: str = "", *, caller: str = ""
) -> None:
    """Asserts that the call is refused with this error."""
    error = await error_of(_generate(stub, caller))
    assert (type(error), error.reason) == (kind, reason)
    assert said in error.message


@pytest.fixture
def callers() -> Callers:
    return Callers()


@pytest.fixture
def own(tmp_path: Path) -> Path:
    return issue(tmp_path, "orchestrator/main")


async def test_a_client_certificate_names_the_caller(tmp_path: Path, own: Path, callers: Callers) -> None:
    async with _orchestrator(callers, own=own, client=issue(tmp_path, "client/team-a", "client/team-c")) as stub:
        await _generate(stub)
        await _generate(stub, "team-c")
    assert callers.seen == ["team-a", "team-c"]


async def test_a_caller_that_the_certificate_does_not_name_is_rejected(
    tmp_path: Path, own: Path, callers: Callers
) -> None:
    async with _orchestrator(callers, own=own, client=issue(tmp_path, "client/team-a")) as stub:
        await _check_refusal(stub, PermissionDeniedError, "CALLER_MISMATCH", "use one of team-a", caller="team-b")
    assert callers.seen == []


async def test_without_credentials_the_request_names_the_caller(callers: Callers) -> None:
    async with _orchestrator(callers, own=None, client=None) as stub:
        await _generate(stub, "team-b")
    assert callers.seen == ["team-b"]


@pytest.mark.parametrize("name", ["stage/a/a-0", "orchestrator/main", "operator/alice"])
async def test_another_role_may_not_call(tmp_path: Path, own: Path, name: str, callers: Callers) -> None:
    async with _orchestrator(callers, own=own, client=issue(tmp_path, name)) as stub:
        said = "Generate is for clients, and the caller's credentials have the roles of"
        await _check_refusal(stub, PermissionDeniedError, "WRONG_ROLE", said)
    assert callers.seen == []


async def test_a_certificate_without_a_role_is_refused(tmp_path: Path, own: Path) -> None:
    from stagemesh.cli.launcher import certificates

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certificates, "SCHEME", "spiffe://other/")
        client = issue(tmp_path, "client/team-a")
    async with _orchestrator(Callers(), own=own, client=client) as stub:
        await _check_refusal(stub, UnauthenticatedError, "UNKNOWN_IDENTITY")


async def test_a_certificate_of_the_former_scheme_is_refused(
    tmp_path: Path, own: Path, monkeypatch: pytest.MonkeyPatch, callers: Callers
) -> None:
    monkeypatch.setattr("stagemesh.cli.launcher.certificates._NAME", re.compile(".*"))
    former = issue(tmp_path, "client/team-a", "stage/thinker-0")
    remedy = "`stagemesh certificate new FOLDER --authority AUTHORITY --name stage/STAGE/thinker-0 --host HOST`"
    with raises(InvalidRequestError, reason="INVALID_TLS", match=re.escape(remedy)):
        TlsFolder(former)
    # A client in another language does not check its own certificate.
    monkeypatch.setattr(TlsFolder, "_check_times", lambda *_: None)
    async with _orchestrator(callers, own=own, client=former) as stub:
        await _check_refusal(stub, UnauthenticatedError, "UNKNOWN_IDENTITY", remedy)
    assert callers.seen == []


@pytest.mark.parametrize("client", ["none", "alone", "other authority", "expired"])
async def test_connections_without_a_valid_certificate_are_refused(
    tmp_path: Path, own: Path, client: str, monkeypatch: pytest.MonkeyPatch, callers: Callers
) -> None:
    # A client of Stagemesh notices an expired certificate itself. Others do not.
    monkeypatch.setattr(TlsFolder, "_check_times", lambda *_: None)
    folder = issue(tmp_path, "client/a", hours=1 if client != "expired" else -0.01)
    if client == "other authority":
        other = issue(tmp_path, "client/a", authority="other")
        (other / "ca.crt").write_bytes((own / "ca.crt").read_bytes())
        folder = other
    if client == "alone":
        for name in ("tls.crt", "tls.key"):
            (folder / name).unlink()
    async with _orchestrator(callers, own=own, client=None if client == "none" else folder) as stub:
        error = await error_of(_generate(stub))
    assert error.code.name == "UNAVAILABLE"
    assert callers.seen == []


async def test_a_server_of_another_authority_is_not_called(tmp_path: Path, own: Path, callers: Callers) -> None:
    async with _orchestrator(callers, own=own, client=issue(tmp_path, "client/a", authority="other")) as stub:
        error = await error_of(_generate(stub))
    assert "CERTIFICATE_VERIFY_FAILED" in error.message
    assert callers.seen == []


# -- tokens


def _write_tokens(path: Path, **tokens: str) -> Path:
    """Writes a file with these tokens, by caller."""
    path.unlink(missing_ok=True)
    for caller, token in tokens.items():
        add_token(path, token, TokenEntry(caller))
    return path


@asynccontextmanager
async def _by_token(
    folder: Path, token: str, config: TokenConfig, callers: Callers
) -> "AsyncGenerator[OrchestratorServiceAsyncStub]":
    own, ca, file = issue(folder, "orchestrator/main"), folder / "client", folder / "token"
    ca.mkdir()
    (ca / "ca.crt").write_bytes((own / "ca.crt").read_bytes())
    file.write_text(token)
    async with _orchestrator(callers, own=own, client=ca, token=file, tokens=config) as stub:
        yield stub


async def test_a_token_names_the_caller(tmp_path: Path, callers: Callers) -> None:
    config = TokenConfig(file=str(_write_tokens(tmp_path / "tokens", alice="secret", bob="other")))
    async with _by_token(tmp_path, "secret", config, callers) as stub:
        await _generate(stub)
        await _generate(stub, "alice")
        await _check_refusal(stub, PermissionDeniedError, "CALLER_MISMATCH", caller="bob")
    assert callers.seen == ["alice", "alice"]


async def test_a_revoked_token_is_refused_at_the_next_call(tmp_path: Path, callers: Callers) -> None:
    file = _write_tokens(tmp_path / "tokens", alice="secret")
    async with _by_token(tmp_path, "secret", TokenConfig(file=str(file)), callers) as stub:
        await _generate(stub)
        _write_tokens(file, alice="another")
        await _check_refusal(stub, UnauthenticatedError, "INVALID_TOKEN")
    assert callers.seen == ["alice"]


def _replace_by_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


_LOSSES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "emptied": lambda file: file.write_text(""),
    "without tokens": lambda file: file.write_text("{}"),
    "half written": lambda file: file.write_bytes(file.read_bytes()[:-20]),
    "a folder": _replace_by_folder,
}


@pytest.mark.parametrize("lose", _LOSSES.values(), ids=_LOSSES)
async def test_the_tokens_of_a_lost_file_are_refused_until_it_is_back(
    tmp_path: Path, lose: Callable[[Path], object], callers: Callers
) -> None:
    file = _write_tokens(tmp_path / "tokens", alice="secret")
    async with _by_token(tmp_path, "secret", TokenConfig(file=str(file)), callers) as stub:
        await _generate(stub)
        lose(file)
        for _ in range(2):
            await _check_refusal(stub, UnauthenticatedError, "INVALID_TOKEN")
        if file.is_dir():
            file.rmdir()
        _write_tokens(file, alice="secret")
        await _generate(stub)
    assert callers.seen == ["alice", "alice"]


async def test_an_expired_token_of_the_file_is_refused(tmp_path: Path) -> None:
    add_token(tmp_path / "tokens", "secret", TokenEntry("alice", datetime.now(UTC) - timedelta(seconds=1)))
    async with _by_token(tmp_path, "secret", TokenConfig(file=str(tmp_path / "tokens")), Callers()) as stub:
        await _check_refusal(stub, UnauthenticatedError, "INVALID_TOKEN")


async def test_a_call_without_a_token_is_refused(tmp_path: Path, own: Path) -> None:
    config = TokenConfig(file=str(_write_tokens(tmp_path / "tokens", alice="secret")))
    async with _orchestrator(Callers(), own=own, client=issue(tmp_path, "client/alice"), tokens=config) as stub:
        await _check_refusal(stub, UnauthenticatedError, "NO_TOKEN")


@pytest.fixture(scope="module")
def key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=65537, key_size=2048)


def _keys(path: Path, key: rsa.RSAPrivateKey, *, name: str = "1") -> Path:
    """Writes the key set of a provider."""
    document = jwt.algorithms.RSAAlgorithm.to_jwk(key.public_key(), as_dict=True) | {"kid": name, "use": "sig"}
    path.write_text(json.dumps({"keys": [document]}))
    return path


def _provider(keys: Path) -> TokenConfig:
    return TokenConfig(keys=str(keys), issuer=ISSUER, audience=AUDIENCE)


@pytest.fixture
def checker(tmp_path: Path, key: rsa.RSAPrivateKey, monkeypatch: pytest.MonkeyPatch) -> TokenChecker:
    """Checks tokens of a provider whose keys are in the file `keys`."""
    monkeypatch.setattr(authentication, "_FETCH_PAUSE_S", 0.0)
    return TokenChecker(_provider(_keys(tmp_path / "keys", key)))


def _signed(key: Any, *, algorithm: str = "RS256", name: str = "1", **changes: Any) -> str:
    """Returns a token. A claim that is None is left out."""
    claims = {"iss": ISSUER, "aud": AUDIENCE, "sub": "alice", "exp": time.time() + 600} | changes
    given = {claim: value for claim, value in claims.items() if value is not None}
    return jwt.encode(given, key, algorithm, {"kid": name})


async def test_a_provided_token_names_the_caller(tmp_path: Path, key: rsa.RSAPrivateKey, callers: Callers) -> None:
    config = _provider(_keys(tmp_path / "keys", key))
    async with _by_token(tmp_path, _signed(key), config, callers) as stub:
        await _generate(stub)
    assert callers.seen == ["alice"]


async def test_a_new_key_of_the_provider_is_found(tmp_path: Path, checker: TokenChecker) -> None:
    new = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    token = _signed(new, name="2")
    with pytest.raises(UnauthenticatedError, match="its key is not one of the provider's"):
        await checker.find_caller(token)
    _keys(tmp_path / "keys", new, name="2")
    assert await checker.find_caller(token) == "alice"


async def test_the_keys_remain_valid_while_the_provider_cannot_be_read(
    tmp_path: Path, key: rsa.RSAPrivateKey, checker: TokenChecker, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys").write_text("damaged")
    with pytest.raises(UnauthenticatedError):
        await checker.find_caller(_signed(key, name="2"))
    assert "the previous keys remain valid" in caplog.text
    assert await checker.find_caller(_signed(key)) == "alice"


@pytest.mark.parametrize("present", ["another key", "none"])
async def test_a_key_is_not_valid_beyond_the_limit(
    tmp_path: Path, key: rsa.RSAPrivateKey, checker: TokenChecker, monkeypatch: pytest.MonkeyPatch, present: str
) -> None:
    """The provider has withdrawn the key, or does not answer, and no client has called for the time of the limit."""
    assert await checker.find_caller(_signed(key)) == "alice"
    new = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    _keys(tmp_path / "keys", new, name="2")
    if present == "none":
        (tmp_path / "keys").unlink()
    monkeypatch.setattr(authentication, "_KEYS_LIMIT_S", 0.0)
    with pytest.raises(UnauthenticatedError, match="its key is not one of the provider's"):
        await checker.find_caller(_signed(key))
    if present == "another key":
        assert await checker.find_caller(_signed(new, name="2")) == "alice"


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"keys": []}', '{"keys": [{"kty": "RSA"}]}'])
def test_damaged_keys_are_an_error_at_the_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "keys").write_text(content)
    with raises(InvalidRequestError, reason="INVALID_TOKENS", match="keys cannot be read"):
        TokenChecker(_provider(tmp_path / "keys"))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"tokens": [1]}', '{"tokens": [{"sha256": "x"}]}', '{"tokens": 1}']
)
def test_a_damaged_file_of_tokens_is_an_error_at_the_start(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokens").write_text(content)
    with raises(InvalidRequestError, reason="INVALID_TOKENS", match="tokens is damaged"):
        TokenChecker(TokenConfig(file=str(tmp_path / "tokens")))


_OTHER_CLAIMS = {
    "replayed after its expiry": ({"exp": 1_700_000_000}, "expired"),
    "without expiry": ({"exp": None}, "exp"),
    "for another service": ({"aud": "another service"}, "[Aa]udience"),
    "other issuer": ({"iss": "https://other.example"}, "issuer"),
    "no caller": ({"sub": ""}, "no claim 'sub'"),
    "too early": ({"nbf": 4_000_000_000}, "not yet valid"),
}


@pytest.mark.parametrize(("claims", "problem"), _OTHER_CLAIMS.values(), ids=_OTHER_CLAIMS)
async def test_other_tokens_of_the_provider_are_refused(
    checker: TokenChecker, key: rsa.RSAPrivateKey, claims: dict[str, Any], problem: str
) -> None:
    with raises(UnauthenticatedError, reason="INVALID_TOKEN", match=problem):
        await checker.find_caller(_signed(key, **claims))


_FORGERIES = {
    "other key": lambda: _signed(rsa.generate_private_key(public_exponent=65537, key_size=2048)),
    "unknown key": lambda: _signed(ec.generate_private_key(ec.SECP256R1()), algorithm="ES256", name="2"),
    "no signature": lambda: _signed(None, algorithm="none"),
    "shared secret": lambda: _signed("x" * 64, algorithm="HS256"),
    "no token": lambda: "not.a.token",
}


@pytest.mark.parametrize("forged", _FORGERIES.values(), ids=_FORGERIES)
async def test_forged_tokens_are_refused(checker: TokenChecker, forged: Callable[[], str]) -> None:
    with raises(UnauthenticatedError, reason="INVALID_TOKEN"):
        await checker.find_caller(forged())


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({}, "tokens need `file` or `keys`"),
        ({"keys": "/keys"}, "belong together"),
        ({"file": "/tokens", "issuer": ISSUER, "audience": AUDIENCE}, "belong together"),
        ({"keys": "/keys", "issuer": ISSUER}, "belong together"),
        ({"keys": "http://id.example/keys", "issuer": ISSUER, "audience": AUDIENCE}, "it must be an https URL"),
    ],
)
def test_half_a_configuration_of_tokens_is_an_error(values: dict[str, str], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        TokenConfig(**values)


def test_tokens_are_part_of_a_config_file(tmp_path: Path) -> None:
    config = OrchestratorConfig("p.yaml", {}, "127.0.0.1:0", tls="/tls", tokens=TokenConfig(file="/tokens"))
    (tmp_path / "config.json").write_bytes(dump_config(config))
    assert load_config(OrchestratorConfig, tmp_path / "config.json") == config


def test_tokens_without_tls_are_an_error() -> None:
    tokens, media = TokenConfig(file="/tokens"), MediaConfig(store="/store")
    with pytest.raises(ValueError, match="tokens need tls"):
        OrchestratorConfig("p.yaml", {}, "127.0.0.1:0", tokens=tokens)
    with pytest.raises(ValueError, match="tokens need tls"):
        MediaServiceConfig("p", "127.0.0.1:0", media, tokens=tokens)
