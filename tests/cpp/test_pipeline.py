"""The stage in C++ between two Python stages, of which each is killed and started again."""

import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.client import Text
from stagemesh.client.responses import ResultBuilder
from tests.cpp.programs import UPPER, require_stage
from tests.deployment import Deployment, deployed
from tests.system.pipelines import pipeline_file

STEPS = 12
EXTERNAL = "upper (external)"
PIPELINE = f"""\
pipeline: cpp
stages:
  writer: {{engine: fake, function: source, options: {{steps: {STEPS}, step_s: 0.02, size_bytes: 200000}}}}
  upper:
    engine: external
    signature:
      accepts: {{text: "uint8[bytes]"}}
      emits: {{text: {{type: "uint8[bytes]", kind: text}}}}
      options: {{times: {{default: 1, minimum: 1, maximum: 1000}}}}
  frames: {{engine: fake, function: frames}}
edges:
  - {{from: writer, to: upper}}
  - {{from: upper, to: frames, chunk: {{frames: 100000, ramp: [1000]}}}}
outputs: {{source: writer, text: upper, frames: frames}}
"""


class Pipeline:
    """The running pipeline, and its replica in C++."""

    def __init__(self, up: Deployment, command: list[str]) -> None:
        self.up = up
        self._command = command
        self.replica = subprocess.Popen(command)

    def restart(self) -> None:
        """Kills the replica in C++ and starts another one under its name."""
        self.stop()
        self.replica = subprocess.Popen(self._command)

    def stop(self) -> None:
        self.replica.kill()
        self.replica.wait()

    def text(self, seed: int = 3, *, at: Callable[[], None] = lambda: None) -> tuple[str, bytes]:
        """Runs a request, and checks the text of the stage in C++. Returns it, and what its consumer made of it.

        Calls `at` after a third of the texts.
        """
        builder, texts = ResultBuilder(), 0
        with self.up.client() as client:
            for event in client.generate("hello", seed=seed):
                builder.add(event)
                if isinstance(event, Text) and event.output == "text":
                    texts += 1
                    if texts == STEPS // 3:
                        at()
        result = builder.build()
        assert result.texts["text"] == result.texts["source"].upper()
        assert len(result.texts["text"]) > STEPS * 150_000
        assert result.finishes["text"].reason == "end"
        return result.texts["text"], b"".join(output.tensor.tobytes() for output in result.tensors["frames"])


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pipeline]:
    require_stage()
    path = pipeline_file(tmp_path_factory.mktemp("cpp"), PIPELINE)
    admin = f"127.0.0.1:{PortPicker().pick()}"
    with deployed(path, "--admin-port", admin.rpartition(":")[2], until=_waits) as up:
        generation = up.statuses[EXTERNAL]["detail"].partition("generation ")[2].partition(",")[0]
        running = Pipeline(up, [str(UPPER), "--pipeline", "cpp", "--generation", generation, "--register", admin])
        try:
            up.wait(Deployment.all_ready)
            yield running
        finally:
            running.stop()


def _waits(up: Deployment) -> bool:
    # The orchestrator is not ready before the external stage is.
    states = {status["name"]: status["state"] for status in up.statuses.values() if status["stage"]}
    return len(states) == 3 and states == {name: "waiting" if name == EXTERNAL else "ready" for name in states}


def test_large_requests_at_once_arrive_byte_for_byte(pipeline: Pipeline) -> None:
    with ThreadPoolExecutor(10) as pool:
        results = [each.result() for each in [pool.submit(pipeline.text, seed % 10) for seed in range(20)]]
    assert results[:10] == results[10:]
    assert len({text for text, _ in results}) == 10


@pytest.mark.parametrize("victim", ["upper", "writer-0", "frames-0"])
def test_killed_stage_changes_nothing(pipeline: Pipeline, victim: str) -> None:
    up = pipeline.up
    expected, process_id = pipeline.text(), None if victim == "upper" else up.process_id(victim)
    kill = pipeline.restart if process_id is None else lambda: up.kill(victim)
    assert pipeline.text(at=kill) == expected
    up.wait(lambda up: (process_id is None or not up.runs(victim, process_id)) and up.all_ready())
