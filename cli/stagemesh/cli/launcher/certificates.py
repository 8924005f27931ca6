"""An authority for certificates: a folder whose key signs the certificates of replicas, orchestrators and users.

It serves deployments by `stagemesh up` or by hand. A cluster has an authority of its own, for example cert-manager.
"""

import ipaddress
import re
import secrets
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from stagemesh.common.errors import InvalidRequestError, file_access
from stagemesh.rpc.callers import SCHEME
from stagemesh.rpc.credentials import CA, CERTIFICATE, KEY, write_private

_CA_KEY = "ca.key"
_CA_DAYS = 3650
_CLOCK_SKEW = timedelta(minutes=5)
"""Certificates are valid from before now, for hosts whose clocks are late."""
_NAME = re.compile(r"(client|operator|orchestrator)/[!-~]+|stage/[^*/\s]+/[!-~]+")


class Authority:
    """The authority in a folder with `ca.crt` and `ca.key`. Who can read `ca.key` can issue any certificate."""

    def __init__(self, folder: Path) -> None:
        """Reads the authority, or creates one if the folder has none.

        Raises InvalidRequestError (INVALID_TLS) if the folder cannot be used or has only one of the two files.
        """
        certificate, key = folder / CA, folder / _CA_KEY
        try:
            if not certificate.exists() and not key.exists():
                _create_authority(certificate, key)
            self._pem = certificate.read_bytes()
            loaded = serialization.load_pem_private_key(key.read_bytes(), password=None)
            self._certificate = x509.load_pem_x509_certificate(self._pem)
        except OSError as exc:
            raise InvalidRequestError(
                f"{exc.filename} cannot be used: {exc.strerror}; an authority's folder contains {CA} and {_CA_KEY}",
                reason="INVALID_TLS",
            ) from exc
        except (ValueError, TypeError) as exc:
            raise InvalidRequestError(f"the authority in {folder} is damaged: {exc}", reason="INVALID_TLS") from exc
        if loaded.public_key() != self._certificate.public_key() or not isinstance(loaded, ec.EllipticCurvePrivateKey):
            raise InvalidRequestError(f"{certificate} and {key} do not belong together", reason="INVALID_TLS")
        self._key = loaded

    def issue(self, folder: Path, names: Sequence[str], *, hosts: Sequence[str] = (), days: float = 90) -> Path:
        """Writes a new certificate with its key and the authority's certificate to `folder`, and returns the folder.

        - `names` are the roles and names of its owner, for example "stage/thinker/thinker-0". Empty only with `hosts`.
        - `hosts` are the DNS names and IP addresses at which the owner listens.
        - `days` is the number of days until it expires.

        Raises InvalidRequestError (INVALID_TLS) if a name is not valid, if there are neither names nor hosts, or if the
        folder cannot be written.
        """
        if not (names or hosts):
            raise InvalidRequestError("a certificate needs a name or a host; state one", reason="INVALID_TLS")
        key = ec.generate_private_key(ec.SECP256R1())
        alternatives = [*(_uri(name) for name in names), *(_host(host) for host in hosts)]
        builder = (
            _builder(_subject((*names, *hosts)[0]), key, days=days)
            .issuer_name(self._certificate.subject)
            .add_extension(x509.SubjectAlternativeName(alternatives), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(
                x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]),
                critical=False,
            )
        )
        with file_access(f"the certificates in {folder} cannot be written", reason="INVALID_TLS"):
            write_private(folder / CA, self._pem)
            write_private(folder / KEY, _private(key))
            write_private(folder / CERTIFICATE, builder.sign(self._key, hashes.SHA256()).public_bytes(_PEM))
        return folder


_PEM = serialization.Encoding.PEM


def _create_authority(certificate: Path, key: Path) -> None:
    own = ec.generate_private_key(ec.SECP256R1())
    # OpenSSL finds an authority by its name, so that each has its own.
    name = _subject(f"Stagemesh authority {secrets.token_hex(4)}")
    authority = x509.BasicConstraints(ca=True, path_length=0)
    builder = _builder(name, own, days=_CA_DAYS).issuer_name(name).add_extension(authority, critical=True)
    write_private(key, _private(own))
    write_private(certificate, builder.sign(own, hashes.SHA256()).public_bytes(_PEM))


def _builder(subject: x509.Name, key: ec.EllipticCurvePrivateKey, *, days: float) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + timedelta(days=days))
    )


def _uri(name: str) -> x509.UniformResourceIdentifier:
    if _NAME.fullmatch(name) is None:
        raise InvalidRequestError(
            f"{name!r} is not a name for a certificate; write stage/STAGE/REPLICA, client/NAME, operator/NAME or "
            "orchestrator/NAME",
            reason="INVALID_TLS",
        )
    return x509.UniformResourceIdentifier(f"{SCHEME}{name}")


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _subject(name: str) -> x509.Name:
    # A common name has at most 64 characters. The names that count are the alternative ones.
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name[:64])])


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
