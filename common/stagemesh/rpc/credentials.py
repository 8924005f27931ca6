"""Credentials: certificates for TLS, tokens, the credentials that this process uses, and private files for them."""

import logging
import os
import ssl
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from stagemesh.common.errors import InvalidRequestError, UnauthenticatedError
from stagemesh.rpc.callers import read_names


def write_private(path: Path, content: bytes) -> None:
    """Replaces the file at `path` atomically. Creates its folder if necessary. Only the user can read the new file.

    Raises OSError if the file cannot be written. The earlier file then remains.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The file has mode 0600 from the start.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


CA, CERTIFICATE, KEY = "ca.crt", "tls.crt", "tls.key"

_log = logging.getLogger(__name__)


class _Pems(NamedTuple):
    ca: bytes
    certificate: bytes | None
    key: bytes | None


def file_version(path: Path) -> tuple[int, int, int]:
    """Returns a value that changes when the file at `path` changes.

    Raises OSError if the file does not exist.
    """
    status = path.stat()
    # The time alone may be the same for two changes within a few milliseconds.
    return status.st_mtime_ns, status.st_ino, status.st_size


class TlsFolder:
    """The certificates in a folder. They are read again when the files have changed, so that they can be renewed."""

    def __init__(self, path: Path | str, *, needs_certificate: bool = True) -> None:
        """Reads the certificates. Raises InvalidRequestError (INVALID_TLS) if one is missing, damaged or unsuitable.

        If `needs_certificate` is False, the folder may contain `ca.crt` alone.
        """
        self.path = Path(path)
        self._needs_certificate = needs_certificate
        self._version = self._find_version()
        self._pems = self._read()

    @property
    def version(self) -> tuple[int, ...]:
        """A value that changes when the certificates have been renewed. New connections then use the new ones."""
        self._refresh()
        return self._version

    @property
    def expires_at_s(self) -> float | None:
        """The end of the certificate's validity, in seconds since 1970. None if there is no certificate."""
        from cryptography import x509

        self._refresh()
        if self._pems.certificate is None:
            return None
        return x509.load_pem_x509_certificate(self._pems.certificate).not_valid_after_utc.timestamp()

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Returns the credentials of a connection to a server."""
        self._refresh()
        return grpc.ssl_channel_credentials(self._pems.ca, self._pems.key, self._pems.certificate)

    def server_credentials(self, *, ask_certificate: bool) -> grpc.ServerCredentials:
        """Returns the credentials of a port. It uses renewed certificates for new connections.

        If `ask_certificate` is True, callers must have a certificate of an authority in `ca.crt`.
        """
        used: list[_Pems] = [self._pems]

        def renewed() -> Any:
            # gRPC continues with the previous certificates if this function returns None.
            self._refresh()
            if self._pems is used[0]:
                return None
            used[0] = self._pems
            return _server_configuration(self._pems)

        return grpc.dynamic_ssl_server_credentials(
            _server_configuration(self._pems), renewed, require_client_authentication=ask_certificate
        )

    def _refresh(self) -> None:
        """Reads the files again if they have changed. Continues with the previous certificates if that fails."""
        try:
            version = self._find_version()
            if version != self._version:
                # A failure is reported once, not for each connection.
                self._version = version
                self._pems = self._read()
                _log.info("renewed the certificates of %s", self.path)
        except InvalidRequestError as exc:
            _log.error("the previous certificates remain in use: %s", exc.message)

    def _find_version(self) -> tuple[int, ...]:
        try:
            return tuple(part for name in self._names() for part in file_version(self.path / name))
        except OSError as exc:
            raise self._invalid(f"{exc.filename} cannot be read: {exc.strerror}") from exc

    def _names(self) -> tuple[str, ...]:
        alone = not self._needs_certificate and not any((self.path / name).exists() for name in (CERTIFICATE, KEY))
        return (CA,) if alone else (CA, CERTIFICATE, KEY)

    def _read(self) -> _Pems:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        problem = f"{self.path / CA} contains no certificate"
        try:
            ca, *own = [(self.path / name).read_bytes() for name in self._names()]
            context.load_verify_locations(self.path / CA)
            if not own:
                return _Pems(ca, None, None)
            problem = f"{self.path / CERTIFICATE} and {KEY} are damaged, encrypted, or do not belong together"
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.path / CERTIFICATE, self.path / KEY, password="")
        except ssl.SSLError as exc:
            raise self._invalid(f"{problem} ({exc.reason or exc})") from exc
        except OSError as exc:
            raise self._invalid(f"{exc.filename} cannot be read: {exc.strerror}") from exc
        self._check_times(own[0])
        return _Pems(ca, *own)

    def _check_times(self, certificate: bytes) -> None:
        """Raises InvalidRequestError (INVALID_TLS) if the certificate has expired, is not valid yet, or has a name of
        the former scheme.
        """
        try:
            from cryptography import x509
        except ImportError:
            # Programs that only call pipelines may lack this package. Servers check the times, too.
            return
        parsed = x509.load_pem_x509_certificate(certificate)
        now = datetime.now(UTC)
        if not parsed.not_valid_before_utc <= now < parsed.not_valid_after_utc:
            raise InvalidRequestError(
                f"{self.path / CERTIFICATE} is valid from {parsed.not_valid_before_utc:%Y-%m-%d %H:%M} to "
                f"{parsed.not_valid_after_utc:%Y-%m-%d %H:%M} UTC, and it is {now:%Y-%m-%d %H:%M}; renew it",
                reason="INVALID_TLS",
            )
        alternatives = [each.value for each in parsed.extensions if isinstance(each.value, x509.SubjectAlternativeName)]
        try:
            read_names(uri for each in alternatives for uri in each.get_values_for_type(x509.UniformResourceIdentifier))
        except UnauthenticatedError as exc:
            raise InvalidRequestError(f"{self.path / CERTIFICATE}: {exc.message}", reason="INVALID_TLS") from exc

    def _invalid(self, problem: str) -> InvalidRequestError:
        names = CA if not self._needs_certificate else f"{CA}, {CERTIFICATE} and {KEY}"
        return InvalidRequestError(f"{problem}; a folder for TLS contains {names}", reason="INVALID_TLS")


class TokenFile(grpc.AuthMetadataPlugin):
    """Adds the token in a file to each call. The file is read for each call, so that the token can be renewed."""

    def __init__(self, path: Path | str) -> None:
        """Checks the file. Raises InvalidRequestError (INVALID_TOKENS) if it cannot be read or contains no token."""
        self._path = Path(path)
        self._read()

    def __call__(self, context: grpc.AuthMetadataContext, callback: grpc.AuthMetadataPluginCallback) -> None:
        del context
        try:
            callback((("authorization", f"Bearer {self._read()}"),), None)
        except InvalidRequestError as exc:
            callback((), exc)

    def _read(self) -> str:
        try:
            token = self._path.read_text(encoding="ascii").strip()
        except (OSError, ValueError) as exc:
            problem = exc.strerror if isinstance(exc, OSError) else "it is not ASCII text"
            raise InvalidRequestError(f"{self._path} cannot be read: {problem}", reason="INVALID_TOKENS") from exc
        if not token or not token.isprintable():
            raise InvalidRequestError(f"{self._path} does not contain one token", reason="INVALID_TOKENS")
        return token


class Credentials:
    """The certificates and the token of a process or of a client. Without TLS, it has neither."""

    def __init__(
        self,
        tls: Path | str | None = None,
        *,
        token: str | None = None,
        token_file: Path | str | None = None,
        needs_certificate: bool = True,
    ) -> None:
        """`tls` is a folder with certificates, and `token_file` is a file with a token. `token` is a token itself.

        All may be None. Raises InvalidRequestError (INVALID_TLS, INVALID_TOKENS) if a file is missing, damaged or
        unsuitable, and (INVALID_REQUEST) if there are two tokens.
        """
        if token is not None and token_file is not None:
            raise InvalidRequestError("a client has one token; give either token or token_file")
        if (token is not None or token_file is not None) and tls is None:
            raise InvalidRequestError(
                "a token needs TLS, because anyone on the network could read it; name the folder with ca.crt",
                reason="INVALID_TLS",
            )
        self.tls = None if tls is None else TlsFolder(tls, needs_certificate=needs_certificate)
        """The certificates, or None for no TLS."""
        self._token: grpc.CallCredentials | None = None
        if token is not None:
            self._token = grpc.access_token_call_credentials(token)
        elif token_file is not None:
            self._token = grpc.metadata_call_credentials(TokenFile(token_file))

    @property
    def version(self) -> tuple[int, ...]:
        """A value that changes when the certificates have been renewed. Channels that are open do not use new ones."""
        return self.tls.version if self.tls is not None else ()

    def for_channel(self) -> grpc.ChannelCredentials | None:
        """Returns the credentials of a channel, or None for a channel without TLS."""
        if self.tls is None:
            return None
        own = self.tls.channel_credentials()
        return own if self._token is None else grpc.composite_channel_credentials(own, self._token)


class ProcessCredentials:
    """The credentials of this process, which all of its channels and ports use.

    A process has one identity: that of a replica, of an orchestrator, or of a user of the command line.
    """

    def __init__(self) -> None:
        self.credentials = Credentials()
        self.permits_plain_tcp = True
        """Whether libraries of this process may use TCP without TLS. By default, not if it has certificates."""

    def use(self, credentials: Credentials) -> None:
        """Sets the credentials. Call this method before the process opens channels and ports."""
        self.credentials = credentials
        self.permits_plain_tcp = credentials.tls is None


PROCESS = ProcessCredentials()


def _server_configuration(pems: _Pems) -> grpc.ServerCertificateConfiguration:
    pair: Any = (pems.key, pems.certificate)
    return grpc.ssl_server_certificate_configuration([pair], root_certificates=pems.ca)
