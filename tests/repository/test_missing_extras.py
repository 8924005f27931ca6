import json
import subprocess
from pathlib import Path

import pytest

from stagemesh.common.errors import ExitCode
from stagemesh.common.process.config import dump_config
from tests.engines.support import stage_config
from tests.repository.installed import STAGEMESH, make_environment

ENGINES = {"vllm": "pip install 'stagemesh[vllm]'", "diffusion": "pip install 'stagemesh[diffusion]'"}
PROGRAMS = [
    ((*STAGEMESH, "version"), "pip install 'stagemesh[cli]'"),
    (("-m", "stagemesh.orchestrator"), "pip install 'stagemesh[orchestrator]'"),
    (("-m", "stagemesh.jobs"), "pip install 'stagemesh[jobs]'"),
    (("-m", "stagemesh.services.stage"), "pip install 'stagemesh[stage]'"),
    (("-m", "stagemesh.services.models", "fetch", "speech"), "pip install 'stagemesh[cli,speech]'"),
]
COMMANDS = [
    (("up", "speech"), "orchestrator"),
    (("demo", "speech", "--prompt", "hello"), "orchestrator"),
    (("pipeline", "validate", "speech"), "orchestrator"),
    (("k8s", "render", "speech"), "orchestrator"),
    (("models", "list"), "orchestrator"),
    (("probe-transport",), "stage"),
    (("bench", "--openai", "http://127.0.0.1:1", "--model", "m"), "bench"),
]


def run(python: Path, *arguments: str, status: int) -> str:
    """Runs a program, and returns what it prints to stderr."""
    ran = subprocess.run([python, *arguments], capture_output=True, text=True, check=False, cwd=python.parent)
    assert ran.returncode == status, ran.stderr
    return ran.stderr


@pytest.fixture(scope="module")
def environments(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The interpreters of environments with one extra each, by extra."""
    folder = tmp_path_factory.mktemp("environments")
    return {
        extra: make_environment(folder / (extra or "base"), extras=[extra] if extra else [])
        for extra in ("", "cli", "stage")
    }


@pytest.mark.parametrize(("program", "remedy"), PROGRAMS, ids=["cli", "orchestrator", "jobs", "stage", "models"])
def test_a_program_without_its_extra_prints_the_remedy(
    environments: dict[str, Path], program: tuple[str, ...], remedy: str
) -> None:
    printed = run(environments[""], *program, status=ExitCode.REFUSED)
    assert printed.startswith("error: ")
    assert printed.endswith(f"; run: {remedy}\n")
    assert len(printed.splitlines()) == 1


@pytest.mark.parametrize(("command", "extra"), COMMANDS, ids=[command[0] for command, _ in COMMANDS])
def test_a_command_without_its_extra_prints_the_remedy(
    environments: dict[str, Path], command: tuple[str, ...], extra: str
) -> None:
    printed = run(environments["cli"], *STAGEMESH, *command, status=ExitCode.REFUSED)
    assert printed.startswith(f"error: `stagemesh {command[0]}` needs the module ")
    assert printed.endswith(f"; run: pip install 'stagemesh[{extra}]'\n")


def test_a_missing_extra_is_an_error_in_json(environments: dict[str, Path]) -> None:
    printed = run(environments["cli"], *STAGEMESH, "pipeline", "validate", "speech", "--json", status=ExitCode.REFUSED)
    assert json.loads(printed)["error"]["reason"] == "MISSING_MODULE"


@pytest.mark.parametrize(
    "command", [("generate", "hello"), ("bench",), ("stages",), ("top", "--once"), ("admin", "replicas")]
)
def test_a_command_that_calls_a_pipeline_needs_the_extra_cli_alone(
    environments: dict[str, Path], command: tuple[str, ...]
) -> None:
    assert "127.0.0.1:1" in run(
        environments["cli"], *STAGEMESH, *command, "--server", "127.0.0.1:1", status=ExitCode.UNAVAILABLE
    )


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stage_without_the_extra_of_its_engine_logs_the_remedy(
    environments: dict[str, Path], engine: str, tmp_path: Path
) -> None:
    (tmp_path / "stage.json").write_bytes(dump_config(stage_config(engine, model=str(tmp_path))))
    program = ("-m", "stagemesh.services.stage", "--config", str(tmp_path / "stage.json"))
    assert ENGINES[engine] in run(environments["stage"], *program, status=ExitCode.REFUSED)
