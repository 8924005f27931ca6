"""The stage in TypeScript between two Python stages: byte for byte the result of the same stage in Python."""

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.client import Result, Text
from stagemesh.client.responses import ResultBuilder
from tests.deployment import Deployment, deployed, eventually
from tests.system.added_transforms import add_function
from tests.system.pipelines import pipeline_file
from tests.system.streaming import Turn, orchestrating
from tests.typescript.nodes import ROOT, program

STEPS = 24
STAGES = 5
UPPER = "upper (external)"
PIPELINE = f"""\
pipeline: both
stages:
  writer: {{engine: fake, function: source, options: {{steps: {STEPS}, step_s: 0.03, size_bytes: 30000}}}}
  upper:
    engine: external
    signature:
      accepts:
        text: uint8[bytes]
      emits:
        text: {{type: "uint8[bytes]", kind: text}}
      options:
        times: {{default: 1, minimum: 1, maximum: 1000}}
  frames: {{engine: fake, function: frames}}
  python: {{engine: function, function: upper}}
  python-frames: {{engine: fake, function: frames}}
edges:
  - {{from: writer, to: upper, when: {{input: stream, given: false}}}}
  - {{from: "@input", to: upper}}
  - {{from: upper, to: frames}}
  - {{from: writer, to: python}}
  - {{from: python, to: python-frames}}
outputs: {{text: upper, frames: frames, python_text: python, python_frames: python-frames}}
"""


class Both:
    """The running pipeline, and its replica in TypeScript."""

    def __init__(self, file: Path, up: Deployment, command: list[str]) -> None:
        self.file, self.up = file, up
        self._command = command
        self.replica = subprocess.Popen(command)

    def restart_upper(self) -> None:
        """Kills the replica in TypeScript and starts another one under its name."""
        self.stop()
        self.replica = subprocess.Popen(self._command)

    def stop(self) -> None:
        self.replica.kill()
        self.replica.wait()


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Both]:
    folder = tmp_path_factory.mktemp("both")
    path = pipeline_file(folder, PIPELINE)
    admin = f"127.0.0.1:{PortPicker().pick()}"
    with _python_function(folder), deployed(path, "--admin-port", admin.rpartition(":")[2], until=_waits) as up:
        generation = up.statuses[UPPER]["detail"].partition("generation ")[2].partition(",")[0]
        arguments = ("--pipeline", "both", "--generation", generation, "--register", admin)
        both = Both(path, up, [*program("upper"), *arguments])
        try:
            up.wait(Deployment.all_ready)
            yield both
        finally:
            both.stop()


def _waits(up: Deployment) -> bool:
    # The orchestrator is not ready before the external stage is.
    states = {status["name"]: status["state"] for status in up.statuses.values() if status["stage"]}
    return len(states) == STAGES and states == {name: "waiting" if name == UPPER else "ready" for name in states}


@contextmanager
def _python_function(folder: Path) -> Iterator[None]:
    """Registers the function "upper" for this process, and for all that are started within the block."""
    source = "from tests.typescript.python_upper import UPPER as DESCRIPTOR\n"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
        add_function(folder, patch, name="upper", source=source)
        yield


def _run(both: Both, *, at: Callable[[], None] | None = None, times: int = 1) -> Result:
    """Runs a request. Calls a function after a third of the texts."""
    builder, texts = ResultBuilder(), 0
    with both.up.client() as client:
        for event in client.generate("hello", seed=3, options={"times": times}):
            builder.add(event)
            texts += isinstance(event, Text) and event.output == "text"
            if texts == STEPS // 3 and at is not None:
                at()
                at = None
    assert at is None
    return builder.build()


def _check(result: Result) -> None:
    assert len(result.texts["text"]) > 0
    assert result.texts["text"] == result.texts["python_text"]
    frames, python_frames = (
        b"".join(output.tensor.tobytes() for output in result.tensors[name]) for name in ("frames", "python_frames")
    )
    assert frames == python_frames
    assert result.finishes["text"].reason == result.finishes["python_text"].reason == "end"


@pytest.mark.parametrize("times", [1, 3])
def test_result_is_that_of_the_same_stage_in_python(both: Both, times: int) -> None:
    result = _run(both, times=times)
    _check(result)
    report = result.finished.stages["upper"]
    assert report.usage.engine_steps == STEPS * times
    (edge,) = report.edges
    assert (edge.edge, edge.connector, edge.chunks) == ("upper->frames", "grpc", STEPS * times)


@pytest.mark.parametrize("victim", ["writer-0", "frames-0", "orchestrator"])
def test_killed_neighbour_changes_nothing(both: Both, victim: str) -> None:
    process_id = both.up.process_id(victim)
    _check(_run(both, at=lambda: both.up.kill(victim)))
    both.up.wait(lambda up: not up.runs(victim, process_id) and up.all_ready())


async def test_input_that_a_client_streams_arrives(both: Both) -> None:
    async with orchestrating(both.file, both.up) as orchestrator:
        turn = Turn(orchestrator, "streamed", "text")
        for word in ("one ", "two " * 2_000, "three"):
            turn.say(word)
            await turn.until_heard("text", word.upper())
        assert await turn.result() == {"text": f"ONE {'TWO ' * 2_000}THREE"}


def test_killed_replica_in_typescript_is_replaced(both: Both) -> None:
    _check(_run(both, at=both.restart_upper))
    eventually(both.up.all_ready, timeout_s=20)
