"""A vllm stage whose replica spans two nodes: the replica on the first, and workers alone on the other."""

import asyncio
import os
import signal
import subprocess
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import yaml
from pydantic import JsonValue

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.services.engines.base import SamplingOptions, Task
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.engines.vllm.engine_core import worker_call
from tests.children import killed_at_end
from tests.cli.commands import COMMAND
from tests.engines.support import collect, stage_config, usage_of
from tests.engines.vllm.tiny_model import OPTIONS, write_tiny_model
from tests.rpc.call_errors import raises

SPREAD: dict[str, JsonValue] = {"tensor_parallel_size": 2, "nnodes": 2, "master_addr": "127.0.0.1"}


def other_node(model: Path) -> "AbstractContextManager[subprocess.Popen[bytes]]":
    """Runs the command of the chart for the second node, whose rank is a variable of the pipeline file."""
    stage = {"engine": "vllm", "model": str(model), "options": {**OPTIONS, **SPREAD, "node_rank": "RANK"}}
    file = model.parent / "pipeline.yaml"
    text = yaml.safe_dump({"pipeline": "p", "stages": {"a": stage}, "outputs": {"text": "a"}})
    file.write_text(text.replace("RANK", "${LWS_WORKER_INDEX}"))
    arguments = (f"--pipeline={file}", "--stage=a", "--replica=a-0", "--listen=127.0.0.1:0", "--drain-s=1")
    environment = {**os.environ, "LWS_WORKER_INDEX": "1"}
    command = [*COMMAND, "serve", "stage", *arguments]
    with (model.parent / "log").open("w") as log:
        return killed_at_end(subprocess.Popen(command, env=environment, stderr=log))


async def tokens(engine: VllmEngine) -> int:
    task = Task("r", 1, "hello", sampling=SamplingOptions(max_tokens=20))
    return usage_of(await collect(engine.submit(task))).output_tokens


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"embeddings": {}}, "rows from the edge are in the memory of the replica's first node"),
        ({"hidden_states": {}, "pipeline_parallel_size": 2}, "last pipeline rank, which is on another node"),
    ],
)
def test_a_feature_of_one_node_is_rejected(options: dict[str, JsonValue], message: str, tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    engine = VllmEngine(stage_config("vllm", model=str(model), options={**SPREAD, **options}))
    with pytest.raises(InvalidRequestError, match=message):
        engine.start_workers()


def test_a_model_that_cannot_be_loaded_is_reported_with_its_place(tmp_path: Path) -> None:
    engine = VllmEngine(stage_config("vllm", model=str(tmp_path), options={**SPREAD, "node_rank": 1}))
    with raises(NotReadyError, reason="LOAD_FAILED", match=f"vLLM cannot load {tmp_path}"):
        engine.start_workers()


@pytest.mark.soak
@pytest.mark.timeout(600)
async def test_workers_of_both_nodes_have_the_features_and_drain(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "model")
    engine = VllmEngine(stage_config("vllm", model=str(model), options={**OPTIONS, **SPREAD, "node_rank": 0}))
    with other_node(model) as process:
        try:
            await engine.start(lambda _: None)
            assert await tokens(engine) == 20
            # Workers without the features of Stagemesh do not have this method.
            assert await worker_call(engine.control.llm, "call_runner", "__str__") != []
            process.send_signal(signal.SIGTERM)
            assert await tokens(engine) == 20
        finally:
            await engine.close()
        assert await asyncio.to_thread(process.wait, 60) == 0
