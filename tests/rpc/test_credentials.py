"""Folders with certificates: what is refused when they are read, and how they are renewed."""

from pathlib import Path

import pytest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.credentials import CA, CERTIFICATE, KEY, Credentials, TlsFolder
from stagemesh.rpc.server import Server
from tests.credentials import issue, process_credentials
from tests.rpc.call_errors import raises
from tests.rpc.health_calls import Request, check


@pytest.mark.parametrize("missing", [CA, CERTIFICATE, KEY])
@pytest.mark.parametrize("needs_certificate", [True, False])
def test_half_a_folder_is_an_error(tmp_path: Path, missing: str, needs_certificate: bool) -> None:
    folder = issue(tmp_path, "stage/a/a-0")
    (folder / missing).unlink()
    with raises(InvalidRequestError, reason="INVALID_TLS", match=f"{missing} cannot be read: No such file"):
        TlsFolder(folder, needs_certificate=needs_certificate)


def test_the_certificate_of_the_authority_is_enough_for_a_client_with_a_token(tmp_path: Path) -> None:
    folder, token = issue(tmp_path, "stage/a/a-0"), tmp_path / "token"
    for name in (CERTIFICATE, KEY):
        (folder / name).unlink()
    token.write_text("secret\n")
    assert Credentials(folder, token_file=token, needs_certificate=False).for_channel() is not None


@pytest.mark.parametrize("content", ["", " \n", "two\nlines", "caf\u00e9"])
def test_a_file_without_one_token_is_refused(tmp_path: Path, content: str) -> None:
    folder, token = issue(tmp_path, "client/a"), tmp_path / "token"
    token.write_text(content)
    with raises(InvalidRequestError, reason="INVALID_TOKENS"):
        Credentials(folder, token_file=token)


def test_a_token_is_not_sent_without_tls(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    with pytest.raises(InvalidRequestError, match="a token needs TLS"):
        Credentials(token_file=tmp_path / "token")


@pytest.mark.parametrize("damaged", [CA, CERTIFICATE, KEY])
def test_damaged_files_are_refused(tmp_path: Path, damaged: str) -> None:
    folder = issue(tmp_path, "stage/a/a-0")
    (folder / damaged).write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with raises(InvalidRequestError, reason="INVALID_TLS"):
        TlsFolder(folder)


def test_a_key_of_another_certificate_is_refused(tmp_path: Path) -> None:
    folder, other = issue(tmp_path, "stage/a/a-0"), issue(tmp_path, "stage/b/b-0")
    (folder / KEY).write_bytes((other / KEY).read_bytes())
    with pytest.raises(InvalidRequestError, match="do not belong together"):
        TlsFolder(folder)


def test_an_expired_certificate_is_refused_when_a_service_starts(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"is valid from .* renew it"):
        TlsFolder(issue(tmp_path, "stage/a/a-0", hours=-0.01))


def test_renewed_files_have_another_version(tmp_path: Path) -> None:
    tls = TlsFolder(issue(tmp_path, "stage/a/a-0"))
    first = tls.version
    assert tls.version == first
    issue(tmp_path, "stage/a/a-0")
    assert tls.version != first


async def test_a_server_continues_with_the_previous_certificate_until_the_new_one_is_whole(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = issue(tmp_path, "stage/a/a-0")
    with process_credentials(folder):
        server = Server("127.0.0.1:0")
        port = await server.start()
    with process_credentials(issue(tmp_path, "operator/o")):
        key = (folder / KEY).read_bytes()
        (folder / KEY).write_text("half")
        async with open_channel(f"127.0.0.1:{port}") as channel:
            await check(channel)(Request(), timeout=10)
        assert "the previous certificates remain in use" in caplog.text
        (folder / KEY).write_bytes(key)
        async with open_channel(f"127.0.0.1:{port}") as channel:
            await check(channel)(Request(), timeout=10)
    await server.stop(grace_s=0)
