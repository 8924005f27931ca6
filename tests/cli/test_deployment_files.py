"""`stagemesh config`, `certificate` and `token`, and the errors of config files."""

import json
import stat
from pathlib import Path

import pytest

from stagemesh.common.errors import ExitCode, InvalidRequestError, UnauthenticatedError
from stagemesh.common.process.config import TokenConfig, load_config
from stagemesh.common.process.stage_process import OrchestratorAddress, StageConfig
from stagemesh.orchestrator.config import OrchestratorConfig, Registration, ReplicaAddress
from stagemesh.rpc.authentication import TokenChecker
from stagemesh.rpc.credentials import KEY, TlsFolder
from tests.cli.commands import invoke
from tests.system.pipelines import relays


def _orchestrator(folder: Path, *arguments: str) -> OrchestratorConfig:
    file = folder / "orchestrator.json"
    invoke("config", "orchestrator", str(relays(folder)), "--output", str(file), *arguments).check(0)
    return load_config(OrchestratorConfig, file)


def test_the_config_of_an_orchestrator_is_complete(tmp_path: Path) -> None:
    config = _orchestrator(tmp_path)
    text = (tmp_path / "orchestrator.json").read_text()
    assert (config.registration, config.admin_listen) == (Registration(30), "127.0.0.1:7781")
    for key in set(OrchestratorConfig.__dataclass_fields__) - {"parent_pid"}:
        before, _, _ = text.partition(f'"{key}"')
        assert before.splitlines()[-2].lstrip().startswith("//"), f"{key} has no comment"
    assert "None" not in text


def test_listed_replicas_belong_to_the_stages_of_their_names(tmp_path: Path) -> None:
    config = _orchestrator(tmp_path, "--replica", "source-0=127.0.0.1:1", "--replica", "frames-a-1=127.0.0.1:2")
    assert config.registration is None
    assert config.replicas == {
        "source": (ReplicaAddress("source-0", "127.0.0.1:1"),),
        "relay": (),
        "frames": (ReplicaAddress("frames-a-1", "127.0.0.1:2"),),
    }
    ran = invoke("config", "orchestrator", str(relays(tmp_path)), "--replica", "talker-0=127.0.0.1:1")
    ran.check(ExitCode.USAGE, "does not begin with a stage's name")


def test_the_config_of_a_replica_is_that_of_the_launcher(tmp_path: Path) -> None:
    file = tmp_path / "relay-7.json"
    pipeline = str(relays(tmp_path))
    address = ("--replica", "relay-7", "--listen", "10.0.0.1:50051", "--orchestrator", "10.0.0.2:7781")
    assert invoke("config", "stage", pipeline, "relay", *address, "-o", str(file)).exit_code == 0
    config = load_config(StageConfig, file)
    generation = json.loads(invoke("pipeline", "validate", pipeline, "--json").stdout)["generation"]
    assert (config.stage, config.replica, config.function) == ("relay", "relay-7", "relay")
    assert (config.generation, config.orchestrators) == (generation, (OrchestratorAddress("10.0.0.2:7781"),))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("stage", "PIPELINE", "rely", "--listen", "127.0.0.1:1"), "has no stage 'rely'; its stages are source, relay"),
        (("stage", "PIPELINE", "relay", "--listen", "127.0.0.1:1", "-o", "/proc/x"), "/proc/x cannot be written"),
    ],
)
def test_a_wrong_command_is_explained(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    pipeline = str(relays(tmp_path))
    invoke("config", *(pipeline if each == "PIPELINE" else each for each in arguments)).check(ExitCode.USAGE, message)


STAGE = """\
{
  // The pipeline.
  "pipeline": "talk", "generation": "1", "stage": "a", "replica": "a-0",
  "engine": "fake",
  "listen": "127.0.0.1:0"
}
"""


@pytest.mark.parametrize(
    ("before", "after", "messages"),
    [
        ('"engine": "fake",', "", ["'engine' is missing; add it, or write a complete file with `stagemesh config`"]),
        ('"engine"', '"engin"', ["'engine' is missing", "line 4: unknown key 'engin'; did you mean 'engine'?"]),
        ('"fake"', "3", ["line 4: engine is 3; input should be a valid string"]),
        ('"fake"', '"fake", "drain_s": -1', ["drain_s is -1; it must be a number of seconds, or 0 for none"]),
        ('"fake",', '"fake"', ["Invalid JSON: ", "at line 5"]),
    ],
)
def test_mistakes_in_a_config_are_explained(tmp_path: Path, before: str, after: str, messages: list[str]) -> None:
    file = tmp_path / "a-0.json"
    file.write_text(STAGE.replace(before, after))
    with pytest.raises(InvalidRequestError) as caught:
        load_config(StageConfig, file)
    for message in messages:
        assert message in caught.value.message
    assert all(line.startswith(f"{file}: ") for line in caught.value.message.splitlines())
    assert "pydantic" not in caught.value.message


def test_comments_are_ignored(tmp_path: Path) -> None:
    file = tmp_path / "a-0.json"
    file.write_text(STAGE)
    assert load_config(StageConfig, file).engine == "fake"


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"none\.json cannot be read: No such file"):
        load_config(StageConfig, tmp_path / "none.json")


def _new(
    folder: Path, *arguments: str, name: str = "stage/thinker/thinker-0", authority: str = "ca"
) -> tuple[int, str]:
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


@pytest.mark.parametrize(
    "name", ["thinker-0", "stage/", "stage/thinker-0", "stage/*/a-0", "admin/alice", "client/a b", "client/caf\u00e9"]
)
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
    invoke("token", "new", str(file), "--caller", "alice").check(ExitCode.USAGE, f"{file} is damaged")
    assert file.read_text() == '{"tokens": [{}]}'
