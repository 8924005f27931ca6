"""A store that speaks S3: objects appear as a whole, and what is discarded leaves nothing."""

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh.common.errors import StagemeshError
from stagemesh.common.media.store import MediaStore
from stagemesh.common.media.stored_file import StoredFileWriter
from tests.deployment import deployed
from tests.media.locations import Bucket, failure, s3_server
from tests.rpc.call_errors import raises
from tests.system.pipelines import pipeline_file

CONTENT = os.urandom(18_000_000)
PART_BYTES = 1 << 20
PIPELINE = """\
pipeline: eye
media:
  store: {bucket.url}/store
  max_file_bytes: 20000000
  storage_options: {bucket.options}
stages:
  eye: {{engine: fake, function: look}}
outputs: {{text: {{from: eye, stored: true, media_type: application/octet-stream}}}}
"""


@pytest.fixture
def bucket() -> Iterator[Bucket]:
    with s3_server() as bucket:
        yield bucket


async def written(store: MediaStore, content: bytes, *, name: str = "a.bin") -> StoredFileWriter:
    writer = await store.create(store.config.uri_of(name), "application/octet-stream")
    for start in range(0, len(content), PART_BYTES):
        await writer.write(content[start : start + PART_BYTES])
    return writer


@pytest.mark.parametrize("size", [0, 5, 8 << 20, len(CONTENT)])
async def test_an_object_appears_when_it_is_committed(bucket: Bucket, tmp_path: Path, size: int) -> None:
    store, content = bucket.store(tmp_path), CONTENT[:size]
    writer = await written(store, content)
    assert bucket.contents() == {}
    file = await writer.commit()
    assert (file.size_bytes, file.sha256) == (size, hashlib.sha256(content).digest())
    assert bucket.contents() == {"store/a.bin": content}
    fetched = await store.fetch(file)
    with fetched.open() as opened:
        fetched.close()
        assert opened.read() == content


@pytest.mark.parametrize("size", [0, 5, len(CONTENT)])
@pytest.mark.parametrize("commits", [False, True])
async def test_a_discarded_object_leaves_nothing(bucket: Bucket, tmp_path: Path, size: int, commits: bool) -> None:
    writer = await written(bucket.store(tmp_path), CONTENT[:size])
    if commits:
        await writer.commit()
    await writer.discard()
    assert (bucket.contents(), bucket.unfinished()) == ({}, [])


async def test_a_large_write_is_sent_in_blocks(bucket: Bucket, tmp_path: Path) -> None:
    store = bucket.store(tmp_path)
    writer = await store.create(store.config.uri_of("a.bin"), "application/octet-stream")
    await writer.write(CONTENT)
    (upload,) = bucket.client.list_multipart_uploads(Bucket=bucket.name)["Uploads"]
    parts = bucket.client.list_parts(Bucket=bucket.name, Key=upload["Key"], UploadId=upload["UploadId"])["Parts"]
    assert [part["Size"] for part in parts] == [8 << 20] * 2
    await writer.commit()
    assert bucket.contents() == {"store/a.bin": CONTENT}


async def test_what_is_not_as_stated_is_rejected(bucket: Bucket, tmp_path: Path) -> None:
    store = bucket.store(tmp_path)
    file = await (await written(store, b"content")).commit()
    assert await failure(store, file.uri, sha256=b"x" * 32) == "MEDIA_MISMATCH"
    assert await failure(store, file.uri + "x") == "UNKNOWN_MEDIA"
    assert await failure(store, f"{bucket.url}/other/a.bin") == "REFERENCE_NOT_ALLOWED"
    large = await (await written(store, CONTENT + CONTENT[: PART_BYTES * 3], name="large.bin")).commit()
    assert await failure(store, large.uri) == "FILE_TOO_LARGE"


async def test_a_store_that_has_gone_is_reported(tmp_path: Path) -> None:
    with s3_server() as bucket:
        store = bucket.store(tmp_path)
        file = await (await written(store, b"content")).commit()
        writer = await store.create(store.config.uri_of("b.bin"), "")
        await writer.write(b"content")
    assert await failure(store, file.uri) == "STORE_UNREACHABLE"
    with raises(StagemeshError, reason="STORE_UNREACHABLE"):
        await writer.commit()
    await writer.discard()


def test_a_pipeline_reads_and_writes_objects(bucket: Bucket, tmp_path: Path) -> None:
    source = tmp_path / "talk.mp4"
    source.write_bytes(CONTENT)
    with deployed(pipeline_file(tmp_path, PIPELINE.format(bucket=bucket))) as up, up.client() as client:
        file = client.upload(source)
        result = client.generate([file, "what is it?"]).result()
        (text,) = result.files["text"]
        for each in (file, text):
            client.download(each, tmp_path / "copy")
            content = (tmp_path / "copy").read_bytes()
            assert (each.size_bytes, each.sha256) == (len(content), hashlib.sha256(content).digest())
    assert content == f"video {len(CONTENT)} {hashlib.sha256(CONTENT).hexdigest()}\n".encode()
    assert sorted(bucket.contents().values()) == sorted([CONTENT, content])
    assert bucket.unfinished() == []


async def test_folders_are_removed_by_the_prefix_of_their_names(bucket: Bucket, tmp_path: Path) -> None:
    store = bucket.store(tmp_path)
    for folder in ("one.1", "one.2", "one.3", "two.1"):
        await (await written(store, CONTENT[:5], name=f"jobs/{folder}/a.bin")).commit()
    await store.remove_folders("jobs", prefix="one.", keep={"one.2"})
    assert bucket.contents().keys() == {"store/jobs/one.2/a.bin", "store/jobs/two.1/a.bin"}
    await store.remove_folders("nothing", prefix="one.")
