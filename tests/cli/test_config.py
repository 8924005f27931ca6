"""`stagemesh config`, and the errors of config files."""

import json
from pathlib import Path

import pytest

from stagemesh.common.errors import ExitCode, InvalidRequestError
from stagemesh.common.process.config import load_config
from stagemesh.common.process.stage_process import OrchestratorAddress, StageConfig
from stagemesh.orchestrator.config import OrchestratorConfig, Registration, ReplicaAddress
from tests.cli.commands import invoke
from tests.system.pipelines import relays


def _orchestrator(folder: Path, *arguments: str) -> OrchestratorConfig:
    file = folder / "orchestrator.json"
    ran = invoke("config", "orchestrator", str(relays(folder)), "--output", str(file), *arguments)
    assert ran.exit_code == 0, ran.stderr
    return load_config(OrchestratorConfig, file)


def test_the_config_of_an_orchestrator_is_complete(tmp_path: Path) -> None:
    config = _orchestrator(tmp_path)
    text = (tmp_path / "orchestrator.json").read_text()
    assert (config.registration, config.admin_listen) == (Registration(30), "127.0.0.1:7781")
    keys = set(OrchestratorConfig.__dataclass_fields__) - {"parent_pid"}
    for key in keys:
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
    assert ran.exit_code == ExitCode.USAGE
    assert "does not begin with a stage's name" in " ".join(ran.stderr.split())


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
    ran = invoke("config", *(pipeline if each == "PIPELINE" else each for each in arguments))
    assert ran.exit_code == ExitCode.USAGE
    assert message in ran.stderr


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
