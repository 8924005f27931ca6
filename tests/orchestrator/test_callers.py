"""The caller of a request, over TLS with client certificates and without."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, cast

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from stagemesh.common.errors import PermissionDeniedError
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.servicer import OrchestratorServicer, add_orchestrator_service
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import orchestrator_pb2, orchestrator_pb2_grpc

if TYPE_CHECKING:
    from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceAsyncStub

_SERVER = "orchestrator.test"


class Authority:
    """A certificate authority that exists only within a test."""

    def __init__(self) -> None:
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _subject("authority")
        self.certificate = _pem(self._sign(self._name, self._key, x509.BasicConstraints(ca=True, path_length=0)))

    def issue(self, name: str, *alternatives: x509.GeneralName) -> tuple[bytes, bytes]:
        """Returns a new private key and its certificate, which names `name` and the subject alternative names."""
        key = ec.generate_private_key(ec.SECP256R1())
        extension = x509.SubjectAlternativeName(alternatives) if alternatives else None
        private = key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        return private, _pem(self._sign(_subject(name), key, extension))

    def _sign(
        self, subject: x509.Name, key: ec.EllipticCurvePrivateKey, extension: x509.ExtensionType | None
    ) -> x509.Certificate:
        now = datetime.now(UTC)
        builder = x509.CertificateBuilder(self._name, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(hours=1))
        if extension is not None:
            builder = builder.add_extension(extension, critical=isinstance(extension, x509.BasicConstraints))
        return builder.sign(self._key, hashes.SHA256())


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


@dataclass
class Callers:
    """An orchestrator that records the callers of requests and produces no outputs."""

    seen: list[str] = field(default_factory=list[str])

    async def generate(
        self, request: orchestrator_pb2.GenerateRequest, *, time_left_s: float | None
    ) -> AsyncGenerator[bytes]:
        del time_left_s
        self.seen.append(request.caller)
        return _nothing()


async def _nothing() -> AsyncGenerator[bytes]:
    for event in list[bytes]():
        yield event


@asynccontextmanager
async def _orchestrator(
    authority: Authority, callers: Callers, *, client: tuple[bytes, bytes] | None
) -> "AsyncGenerator[OrchestratorServiceAsyncStub]":
    """Serves TLS, and yields the stub of a client that presents the key and certificate `client`."""
    server = grpc.aio.server()
    add_orchestrator_service(OrchestratorServicer(cast("Orchestrator", callers)), server)
    own = authority.issue(_SERVER, x509.DNSName(_SERVER))
    credentials = grpc.ssl_server_credentials([own], authority.certificate, require_client_auth=client is not None)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    key, certificate = client or (None, None)
    trusted = grpc.ssl_channel_credentials(authority.certificate, key, certificate)
    options = [("grpc.ssl_target_name_override", _SERVER)]
    async with grpc.aio.secure_channel(f"127.0.0.1:{port}", trusted, options=options) as channel:
        yield orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
    await server.stop(0)


async def _generate(stub: "OrchestratorServiceAsyncStub", caller: str = "") -> None:
    async for _ in stub.Generate(orchestrator_pb2.GenerateRequest(caller=caller), timeout=20):
        pass


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


async def test_a_client_certificate_names_the_caller(authority: Authority) -> None:
    callers = Callers()
    async with _orchestrator(authority, callers, client=authority.issue("team-a")) as stub:
        await _generate(stub)
        await _generate(stub, "team-a")
    assert callers.seen == ["team-a", "team-a"]


async def test_each_alternative_name_of_a_certificate_is_a_caller(authority: Authority) -> None:
    names = x509.UniformResourceIdentifier("spiffe://example/team-a"), x509.DNSName("a.example")
    callers = Callers()
    async with _orchestrator(authority, callers, client=authority.issue("ignored", *names)) as stub:
        await _generate(stub)
        await _generate(stub, "a.example")
    assert callers.seen == ["spiffe://example/team-a", "a.example"]


async def test_a_caller_that_the_certificate_does_not_name_is_rejected(authority: Authority) -> None:
    callers = Callers()
    async with _orchestrator(authority, callers, client=authority.issue("team-a")) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await _generate(stub, "team-b")
    error = from_rpc_error(caught.value, peer="x")
    assert (type(error), error.reason) == (PermissionDeniedError, "CALLER_MISMATCH")
    assert "use one of team-a" in error.message
    assert callers.seen == []


async def test_without_a_certificate_the_request_names_the_caller(authority: Authority) -> None:
    callers = Callers()
    async with _orchestrator(authority, callers, client=None) as stub:
        await _generate(stub, "team-b")
    assert callers.seen == ["team-b"]
