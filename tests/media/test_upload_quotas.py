"""The quota of each caller's uploads, and their age."""

import asyncio
import os
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from stagemesh.common.errors import OverloadedError
from stagemesh.common.media.store import MediaStore
from stagemesh.common.process.media_config import MediaServiceConfig
from stagemesh.conformance.replicas import until
from stagemesh.services.media.service import CallerUploads, Upload, serve
from stagemesh.v1 import media_pb2, request_pb2
from tests.media.locations import files_in, make_store, s3_server
from tests.media.test_service import failure, messages


def part(data: bytes, *, offset: int = 0, last: bool = False, **fields: Any) -> media_pb2.UploadMediaRequest:
    return media_pb2.UploadMediaRequest(media=request_pb2.Media(data=data, offset=offset, last=last), **fields)


class Uploads:
    """The uploads at one media service."""

    def __init__(self, store: MediaStore) -> None:
        self.store = store
        self.callers: dict[str, CallerUploads] = {}

    def begin(self, caller: str = "ada") -> Upload:
        return Upload(self.store, caller=caller, callers=self.callers)

    async def upload(self, size_bytes: int, caller: str = "ada") -> str:
        """Uploads a file, and returns its URI."""
        async with aclosing(self.begin(caller)) as upload:
            await upload.add(part(bytes(size_bytes), last=True))
            return (await upload.finish()).uri

    async def is_refused(self, size_bytes: int = 1, caller: str = "ada") -> bool:
        try:
            await self.upload(size_bytes, caller)
        except OverloadedError as exc:
            return exc.reason == "STORAGE_FULL"
        return False


async def test_a_caller_has_a_number_of_files_and_others_are_not_affected(tmp_path: Path) -> None:
    uploads = Uploads(make_store(tmp_path, max_uploads=3))
    for _ in range(3):
        await uploads.upload(1)
    assert await uploads.is_refused()
    assert not await uploads.is_refused(caller="bob")
    # A service that has just started counts what is stored.
    assert await Uploads(uploads.store).is_refused()
    assert uploads.callers == {}
    assert len(files_in(tmp_path / "store" / "uploads")) == 4


async def test_bytes_count_when_they_are_stated_and_when_they_arrive(tmp_path: Path) -> None:
    uploads = Uploads(make_store(tmp_path, max_upload_bytes=100))
    await uploads.upload(60)
    async with aclosing(uploads.begin()) as upload:
        with pytest.raises(OverloadedError, match=r"101 bytes.*max_upload_bytes"):
            await upload.add(part(b"1", size_bytes=41))
    async with aclosing(uploads.begin()) as upload:
        await upload.add(part(bytes(40)))
        with pytest.raises(OverloadedError):
            await upload.add(part(b"1", offset=40))
    assert not await uploads.is_refused(40)


async def test_uploads_that_run_at_the_same_time_share_the_quota(tmp_path: Path) -> None:
    uploads = Uploads(make_store(tmp_path, max_upload_bytes=100, max_uploads=9))
    async with aclosing(uploads.begin()) as first, aclosing(uploads.begin()) as second:
        await asyncio.gather(first.add(part(bytes(50))), second.add(part(bytes(50))))
        assert await uploads.is_refused()
        await first.add(part(b"", offset=50, last=True))
        await first.finish()
        assert await uploads.is_refused()
    # The second upload was cut off, and left nothing.
    assert not await uploads.is_refused(50)


async def test_files_that_have_expired_do_not_count_while_an_upload_runs(tmp_path: Path) -> None:
    uploads = Uploads(make_store(tmp_path, max_uploads=2))
    async with aclosing(uploads.begin()) as running:
        await running.add(part(b"1"))
        old = Path((await uploads.upload(1)).removeprefix("file://"))
        assert await uploads.is_refused()
        os.utime(old, (0, 0))
        assert not await uploads.is_refused()
        assert old not in files_in(tmp_path)


async def test_a_client_receives_the_error_and_the_names_of_the_limits(tmp_path: Path) -> None:
    error = await failure(make_store(tmp_path, max_upload_bytes=1000), messages(bytes(2000)))
    assert (type(error), error.reason) == (OverloadedError, "STORAGE_FULL")
    assert "media.max_upload_bytes" in error.message
    assert "media.max_uploads" in error.message


async def test_a_uri_does_not_contain_the_name_of_the_caller(tmp_path: Path) -> None:
    uri = await Uploads(make_store(tmp_path)).upload(1, caller="../ada lovelace")
    assert uri.startswith(f"file://{tmp_path}/store/uploads/")
    assert "ada" not in uri.removeprefix(f"file://{tmp_path}")


async def test_old_uploads_are_deleted_by_the_service(tmp_path: Path) -> None:
    store = make_store(tmp_path, keep_uploads_s=3600.0)
    uploads = Uploads(store)
    old, new = [Path((await uploads.upload(1)).removeprefix("file://")) for _ in range(2)]
    former = tmp_path / "store" / "uploads" / "former.png"
    former.write_bytes(b"of a version without folders of callers")
    output = tmp_path / "store" / "outputs" / "a.png"
    output.parent.mkdir()
    output.write_bytes(b"an output")
    for path in (old, former, output):
        os.utime(path, (time.time() - 4000,) * 2)
    stopping = asyncio.Event()
    service = asyncio.create_task(serve(MediaServiceConfig("p", "127.0.0.1:0", store.config), stopping))
    await until(lambda: not old.exists() and not former.exists(), timeout_s=20)
    stopping.set()
    await service
    assert new.exists()
    assert output.exists()


async def test_a_remote_store_is_counted_and_swept(tmp_path: Path) -> None:
    with s3_server() as bucket:
        store = bucket.store(tmp_path)
        uploads = Uploads(store)
        for size_bytes in (10, 20):
            await uploads.upload(size_bytes)
        assert sorted((await store.remove_old_files("uploads", age_s=3600)).values()) == [10, 20]
        assert await store.remove_old_files("uploads", age_s=-60) == {}
        assert bucket.contents() == {}
