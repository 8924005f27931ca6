"""The programs in the documents run. Those that call a server call a pipeline of fake stages.

tests/speech runs the example of docs/gateway.md, and tests/cli/test_replicas_page.py the commands of docs/replicas.md.
"""

import wave
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.local_mesh import LocalMesh, local_mesh
from tests.repository.code_blocks import read_blocks
from tests.system.pipelines import pipeline_file

PIPELINE = """\
pipeline: documented
stages:
  thinker: {engine: fake, function: source, options: {steps: 4}}
  talker: {engine: fake, function: frames}
  vocoder: {engine: fake, function: sound}
edges:
  - {from: thinker, to: talker}
  - {from: talker, to: vocoder}
outputs: {text: thinker, audio: vocoder}
"""
CLIENT = """\
from stagemesh.client import AudioChunk, Client, Text
client = Client("127.0.0.1:7780")
"""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMesh]:
    with local_mesh(pipeline_file(tmp_path_factory.mktemp("documented"), PIPELINE)) as running:
        yield running


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Returns a function that runs a program in an empty folder, and returns what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(code: str, *, endpoint: str = "") -> str:
        code = code.replace("127.0.0.1:7780", endpoint).replace("10.0.0.2:7780", endpoint)
        exec(compile(code, "program.py", "exec"), {"__name__": "__main__"})  # noqa: S102
        return capsys.readouterr().out

    return run


def program(document: str, beginning: str) -> str:
    """Returns the Python block of a document that contains this text."""
    (found,) = [each.code for each in read_blocks(document) if each.language == "python" and beginning in each.code]
    return found


def test_the_quick_start_prints_and_saves(deployment: LocalMesh, run: Callable[..., str], tmp_path: Path) -> None:
    code = program("docs/quick-start.md", "WavWriter")
    assert run(code, endpoint=deployment.endpoint)
    with wave.open(str(tmp_path / "speech.wav")) as audio:
        assert audio.getnframes()


@pytest.mark.parametrize(
    ("document", "beginning", "lines"),
    [
        ("docs/clients.md", "And why is it salty?", 2),
        ("docs/clients.md", "choices=3", 2),
        ("docs/replicas.md", "10.0.0.2:7780", 1),
    ],
)
def test_a_client_of_a_document_prints_answers(
    deployment: LocalMesh, run: Callable[..., str], document: str, beginning: str, lines: int
) -> None:
    printed = run(CLIENT + program(document, beginning), endpoint=deployment.endpoint)
    assert len(printed.splitlines()) == lines


@pytest.mark.parametrize(
    ("document", "beginning", "printed"),
    [
        ("docs/clients.md", 'files("stagemesh.v1")', "orchestrator.proto"),
        ("docs/own-stage.md", "packet = Packet", ""),
        ("docs/extending.md", "class Louder", ""),
        ("docs/extending.md", "LOUDER = ", ""),
    ],
)
def test_a_program_without_a_server_runs(run: Callable[..., str], document: str, beginning: str, printed: str) -> None:
    assert printed in run(program(document, beginning))
