"""The commands that create certificates and tokens."""

import json
import stat
from pathlib import Path

import pytest

from stagemesh.common.errors import ExitCode, UnauthenticatedError
from stagemesh.common.process.config import TokenConfig
from stagemesh.rpc.authentication import TokenChecker
from stagemesh.rpc.credentials import KEY, TlsFolder
from tests.cli.commands import invoke


def _new(folder: Path, *arguments: str, name: str = "stage/thinker-0", authority: str = "ca") -> tuple[int, str]:
    target = ("--authority", str(folder / authority), "--name", name)
    ran = invoke("certificate", "new", str(folder / "own"), *target, *arguments)
    return ran.exit_code, ran.stderr


def test_a_certificate_is_created_and_renewed_by_the_same_authority(tmp_path: Path) -> None:
    assert _new(tmp_path, "--host", "10.0.0.9", "--host", "thinker.example") == (0, "")
    tls = TlsFolder(tmp_path / "own")
    first, authority = tls.version, (tmp_path / "ca" / "ca.crt").read_bytes()
    assert _new(tmp_path) == (0, "")
    assert tls.version != first
    assert (tmp_path / "ca" / "ca.crt").read_bytes() == authority
    assert stat.S_IMODE((tmp_path / "own" / KEY).stat().st_mode) == 0o600


@pytest.mark.parametrize("name", ["thinker-0", "stage/", "admin/alice", "client/a b", "client/caf\u00e9"])
def test_a_name_without_a_role_is_refused(tmp_path: Path, name: str) -> None:
    code, said = _new(tmp_path, name=name)
    assert (code, "is not a name for a certificate" in said) == (ExitCode.USAGE, True)
    assert not (tmp_path / "own").exists()


def test_half_an_authority_is_refused_and_kept(tmp_path: Path) -> None:
    assert _new(tmp_path)[0] == 0
    (tmp_path / "ca" / "ca.key").unlink()
    code, said = _new(tmp_path)
    assert (code, "ca.key cannot be used: No such file" in said) == (ExitCode.USAGE, True)
    assert not (tmp_path / "ca" / "ca.key").exists()


async def test_tokens_of_the_command_are_accepted_until_they_are_removed(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    alice = invoke("token", "new", str(file), "--caller", "alice").stdout.strip()
    bob = json.loads(invoke("token", "new", str(file), "--caller", "bob", "--days", "1", "--json").stdout)
    checker = TokenChecker(TokenConfig(file=str(file)))
    assert [await checker.find_caller(alice), await checker.find_caller(bob["token"])] == ["alice", "bob"]
    assert alice not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    document = json.loads(file.read_text())
    file.write_text(json.dumps({"tokens": [each for each in document["tokens"] if each["caller"] != "alice"]}))
    with pytest.raises(UnauthenticatedError):
        await checker.find_caller(alice)
    assert await checker.find_caller(bob["token"]) == "bob"


def test_a_damaged_file_of_tokens_is_named_and_kept(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text('{"tokens": [{}]}')
    ran = invoke("token", "new", str(file), "--caller", "alice")
    assert (ran.exit_code, f"{file} is damaged" in ran.stderr) == (ExitCode.USAGE, True)
    assert file.read_text() == '{"tokens": [{}]}'
