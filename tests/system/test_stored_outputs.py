"""Outputs that stages encode or store, as real processes whose stages are killed."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from stagemesh.client import Event, MediaChunk, Result
from tests.cli.commands import stagemesh
from tests.deployment import Deployment, deployed
from tests.module_fixtures import made_for_module
from tests.system.pipelines import pipeline_file
from tests.system.reading import read

STEPS = 30
PIPELINE = """\
pipeline: film
stages:
  writer: {{engine: fake, function: source, options: {{steps: {steps}, step_s: 0.05}}}}
  camera: {{engine: fake, function: video, options: {{frame_side: 32}}}}
  tuner: {{engine: fake, function: frames, options: {{checkpoint_steps: 4}}}}
  singer: {{engine: fake, function: sound, options: {{checkpoint_steps: 4}}}}
edges: [{{from: writer, to: camera}}, {{from: writer, to: tuner}}, {{from: tuner, to: singer}}]
outputs:
  script: writer
  film: {{from: camera, media_type: video/mp4, frame_rate: 24, stored: true}}
  song: {{from: singer, media_type: audio/ogg}}
media: {{store: {store}}}
"""


store = made_for_module(Path)


@pytest.fixture(scope="module")
def up(store: Path) -> Iterator[Deployment]:
    with deployed(pipeline_file(store.parent, PIPELINE.format(steps=STEPS, store=store), name="film")) as up:
        yield up


@pytest.fixture(scope="module")
def undisturbed(up: Deployment) -> Result:
    with up.client() as client:
        return client.generate("hello", seed=7).result()


def stored_files(store: Path, request_id: str = "") -> list[Path]:
    return [path for path in store.rglob("*") if path.is_file() and f"/{request_id}" in str(path)]


def without_gaps(events: Iterable[Event]) -> Iterator[Event]:
    """Yields the events. Checks that each media chunk begins where the last one ended."""
    offset = 0
    for event in events:
        if isinstance(event, MediaChunk):
            assert event.offset == offset
            offset += len(event.data)
        yield event


def test_a_stored_output_is_stored_and_downloaded(up: Deployment, undisturbed: Result, tmp_path: Path) -> None:
    (film,) = undisturbed.files["film"]
    with up.client() as client:
        client.download(film, tmp_path / "film.mp4")
    content = (tmp_path / "film.mp4").read_bytes()
    assert (film.media_type, film.size_bytes) == ("video/mp4", len(content))
    assert film.sha256 == hashlib.sha256(content).digest()
    assert Path(film.uri.removeprefix("file://")).read_bytes() == content
    assert undisturbed.media["song"].media_type == "audio/ogg"
    assert undisturbed.finishes.keys() == {"script", "film", "song"}


@pytest.mark.parametrize("victim", ["camera-0", "singer-0"])
def test_a_killed_stage_makes_the_file_again(up: Deployment, store: Path, undisturbed: Result, victim: str) -> None:
    with up.client() as client:
        events = without_gaps(client.generate("hello", seed=7, request_id=f"killed-{victim}"))
        result = read(events, {STEPS // 2: lambda: up.kill(victim)})
    assert result.media == undisturbed.media
    (film,), (same,) = result.files["film"], undisturbed.files["film"]
    assert (film.size_bytes, film.sha256) == (same.size_bytes, same.sha256)
    assert film.uri.endswith(".2.mp4") == (victim == "camera-0")
    assert [str(path) for path in stored_files(store, f"killed-{victim}")] == [film.uri.removeprefix("file://")]
    up.wait(Deployment.all_ready)


async def test_the_command_line_downloads_stored_outputs(up: Deployment, tmp_path: Path) -> None:
    up.wait(Deployment.all_ready)
    ran = await stagemesh(
        "generate", "hello", "--server", up.endpoint, "--max-tokens", "3", "--output", str(tmp_path), "--json"
    )
    document = json.loads(ran.stdout)
    (stored,) = document["stored"]["film"]
    assert document["files"]["film"] == [str(tmp_path / "film.mp4")]
    assert hashlib.sha256((tmp_path / "film.mp4").read_bytes()).hexdigest() == stored["sha256"]
    assert (tmp_path / "song.ogg").read_bytes().startswith(b"OggS")


def test_the_pipeline_describes_its_files(up: Deployment) -> None:
    with up.client() as client:
        outputs = {output.name: (output.media_type, output.stored) for output in client.describe().outputs}
    assert outputs == {"script": ("", False), "film": ("video/mp4", True), "song": ("audio/ogg", False)}
