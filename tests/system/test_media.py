"""Media files in a store: uploads, references and downloads in a running pipeline."""

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from stagemesh.client import AsyncClient, Client, MediaFile, read_media
from stagemesh.common.errors import InvalidRequestError, NotFoundError, PermissionDeniedError, UnsupportedError
from tests.cli.commands import invoke
from tests.deployment import Deployment, deployed
from tests.local_mesh import local_mesh
from tests.rpc.call_errors import raises
from tests.system.pipelines import pipeline_file

EYE = """
pipeline: eye
media:
  store: {folder}/store
  allowed: [{folder}/data]
  max_file_bytes: 20000000
stages:
  eye: {{engine: fake, function: look}}
outputs: {{text: eye}}
"""
CONTENT = os.urandom(12_000_000)
SEEN = f"{len(CONTENT)} {hashlib.sha256(CONTENT).hexdigest()}\n"


class Eye(NamedTuple):
    up: Deployment
    folder: Path


@pytest.fixture(scope="module")
def eye(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Eye]:
    folder = tmp_path_factory.mktemp("eye")
    (folder / "data").mkdir()
    (folder / "data" / "large.mp4").write_bytes(CONTENT)
    with deployed(pipeline_file(folder, EYE.format(folder=folder), name="eye")) as up:
        yield Eye(up, folder)


@pytest.fixture
def client(eye: Eye) -> Iterator[Client]:
    with eye.up.client() as client:
        yield client


def test_an_uploaded_file_reaches_the_engine_and_returns_unchanged(eye: Eye, client: Client, tmp_path: Path) -> None:
    sent = list[int]()
    file = client.upload(eye.folder / "data" / "large.mp4", on_bytes=sent.append)
    assert (file.media_type, file.size_bytes) == ("video/mp4", len(CONTENT))
    assert file.sha256 == hashlib.sha256(CONTENT).digest()
    assert sent == sorted(sent)
    assert sent[-1] == len(CONTENT)
    assert client.generate([file, "what is it?"]).result().texts["text"] == "video " + SEEN
    client.download(file, tmp_path / "copy.mp4")
    assert [path.name for path in tmp_path.iterdir()] == ["copy.mp4"]
    assert (tmp_path / "copy.mp4").read_bytes() == CONTENT


async def test_the_async_client_uploads_and_downloads(eye: Eye, tmp_path: Path) -> None:
    async with AsyncClient(eye.up.endpoint) as client:
        file = await client.upload(eye.folder / "data" / "large.mp4", media_type="image/png")
        assert (await client.generate([file, "what is it?"]).result()).texts["text"] == "image " + SEEN
        received = list[int]()
        await client.download(file.uri, tmp_path / "copy.png", on_bytes=received.append)
    assert (tmp_path / "copy.png").read_bytes() == CONTENT
    assert received[-1] == len(CONTENT)


@pytest.fixture
def huge(tmp_path: Path) -> Path:
    """A file larger than the pipeline allows."""
    path = tmp_path / "huge.mp4"
    with path.open("wb") as file:
        file.truncate(20_000_001)
    return path


def test_an_upload_that_is_too_large_fails_early_and_leaves_nothing(eye: Eye, client: Client, huge: Path) -> None:
    before = sorted((eye.folder / "store").rglob("*"))
    with raises(InvalidRequestError, reason="FILE_TOO_LARGE", match="20000000"):
        client.upload(huge)
    assert sorted((eye.folder / "store").rglob("*")) == before


async def test_an_async_upload_that_is_too_large_fails_early(eye: Eye, huge: Path) -> None:
    async with AsyncClient(eye.up.endpoint) as client:
        with pytest.raises(InvalidRequestError, match="20000000"):
            await client.upload(huge)


def test_a_reference_to_an_allowed_location_needs_no_upload(eye: Eye, client: Client) -> None:
    file = MediaFile(f"file://{eye.folder}/data/large.mp4", "video/mp4")
    assert client.generate([file, "what is it?"]).result().texts["text"] == "video " + SEEN


def test_a_reference_outside_is_rejected_by_the_orchestrator(eye: Eye, client: Client) -> None:
    with pytest.raises(PermissionDeniedError, match="allowed roots") as caught:
        client.generate([MediaFile(f"file://{eye.folder}/eye.yaml", "image/png")]).result()
    assert "stage" not in caught.value.metadata


def test_a_deleted_object_is_reported(eye: Eye, client: Client, tmp_path: Path) -> None:
    missing = MediaFile(f"file://{eye.folder}/data/none.png", "image/png")
    for call in (client.generate([missing]).result, lambda: client.download(missing, tmp_path / "x")):
        with raises(NotFoundError, reason="UNKNOWN_MEDIA"):
            call()
    assert list(tmp_path.iterdir()) == []


def test_a_download_with_another_digest_leaves_nothing(eye: Eye, client: Client, tmp_path: Path) -> None:
    file = MediaFile(f"file://{eye.folder}/data/large.mp4", "video/mp4", sha256=b"x" * 32)
    with pytest.raises(InvalidRequestError, match="digest"):
        client.download(file, tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_limits_are_described(client: Client) -> None:
    limits = client.describe().limits
    assert (limits.max_message_bytes, limits.max_file_bytes) == (8 << 20, 20_000_000)


def test_the_command_line_uploads_what_is_too_large_for_a_request(eye: Eye) -> None:
    small = eye.folder / "data" / "small.png"
    small.write_bytes(b"small")
    files = [str(small), str(eye.folder / "data" / "large.mp4"), f"file://{small}"]
    attached = [text for file in files for text in ("--attach", file)]
    printed = invoke("generate", "what is it?", "--server", eye.up.endpoint, "--json", *attached).output
    image = f"image 5 {hashlib.sha256(b'small').hexdigest()}\n"
    assert json.loads(printed)["texts"]["text"] == image + "video " + SEEN + image


def test_a_pipeline_without_a_store_says_so(tmp_path: Path) -> None:
    text = "pipeline: p\nstages: {eye: {engine: fake, function: look}}\noutputs: {text: eye}\n"
    (tmp_path / "a.png").write_bytes(b"x")
    with local_mesh(pipeline_file(tmp_path, text)) as up, up.client() as client:
        with pytest.raises(UnsupportedError, match="add `media:`"):
            client.upload(tmp_path / "a.png")
        with pytest.raises(UnsupportedError, match="add `media:`"):
            client.generate([MediaFile("file:///x/a.png", "image/png")]).result()
        assert client.generate([read_media(tmp_path / "a.png")]).result().texts["text"].startswith("image 1 ")
