import asyncio
import errno
import hashlib
import os
import threading
from contextlib import ExitStack, aclosing
from pathlib import Path

import pytest

from stagemesh.common.errors import StagemeshError
from stagemesh.common.media import store as store_module
from stagemesh.common.media.store import MediaStore
from stagemesh.common.media.stored_file import call_store
from stagemesh.v1 import request_pb2
from tests.media.locations import failure, files_in, join_store_threads, make_store, placed, web_server
from tests.rpc.call_errors import raises


def reference(uri: str, **fields: object) -> request_pb2.MediaFile:
    return request_pb2.MediaFile(uri=uri, **fields)  # type: ignore[arg-type]


async def fetched(store: MediaStore, file: request_pb2.MediaFile) -> bytes:
    opened = await store.fetch(file)
    with opened.open() as content:
        opened.close()
        return content.read()


async def test_a_committed_file_is_found_with_its_size_and_digest(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    writer = await store.create(store.config.uri_of("outputs", "a.bin"), "application/octet-stream")
    for data in (b"con", b"tent"):
        await writer.write(data)
    written = await writer.commit()
    assert written.size_bytes == 7
    assert written.sha256 == hashlib.sha256(b"content").digest()
    assert await fetched(store, written) == b"content"
    assert len(files_in(tmp_path)) == 1


@pytest.mark.parametrize("commits", [False, True])
async def test_a_file_is_invisible_before_its_commit_and_leaves_nothing_when_it_is_discarded(
    tmp_path: Path, commits: bool
) -> None:
    store = make_store(tmp_path)
    writer = await store.create(store.config.uri_of("a.bin"), "")
    await writer.write(b"con")
    assert await failure(store, writer.uri) == "UNKNOWN_MEDIA"
    if commits:
        await writer.commit()
    await writer.discard()
    assert files_in(tmp_path) == []


async def test_a_restarted_writer_deletes_only_its_own_leftovers(tmp_path: Path) -> None:
    for name in ("dead", "alive"):
        placed(tmp_path, f".partial/{name}/x")
    make_store(tmp_path, writer="dead").prepare()
    assert files_in(tmp_path) == [tmp_path / "store" / ".partial" / "alive" / "x"]


OUTSIDE = (
    *("file:///etc/passwd", "file://{store}/../secret", "file://{store}/x/../../secret", "file://{store}/./a.png"),
    *("file://{store}//a.png", "file://{store}", "file://{store}-2/a.png", "file://{store}/a\n", "{store}/a.png"),
    *("file:{store}/a.png", "s3://{store}/a.png", "simplecache::file://{store}/a.png", "local://{store}/a.png"),
    "file://{store}/" + "a" * 3000,
)


@pytest.mark.parametrize("uri", OUTSIDE)
async def test_a_reference_outside_the_roots_is_rejected(tmp_path: Path, uri: str) -> None:
    placed(tmp_path, "../secret")
    assert await failure(make_store(tmp_path), uri.format(store=tmp_path / "store")) == "REFERENCE_NOT_ALLOWED"


@pytest.mark.parametrize("link", ["file", "folder"])
async def test_a_symbolic_link_out_of_a_root_is_rejected(tmp_path: Path, link: str) -> None:
    placed(tmp_path, "../outside/secret")
    (tmp_path / "store").mkdir(exist_ok=True)
    (tmp_path / "store" / "link").symlink_to(tmp_path / "outside" / ("secret" if link == "file" else ""))
    uri = f"file://{tmp_path}/store/link" + ("" if link == "file" else "/secret")
    assert await failure(make_store(tmp_path), uri) == "REFERENCE_NOT_ALLOWED"


async def test_a_root_may_be_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "store").symlink_to(tmp_path / "real")
    assert await fetched(make_store(tmp_path), reference(placed(tmp_path))) == b"content"


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo])
async def test_only_regular_files_are_read(tmp_path: Path, make: object) -> None:
    (tmp_path / "store").mkdir()
    make(tmp_path / "store" / "x")  # type: ignore[operator]
    assert await failure(make_store(tmp_path), f"file://{tmp_path}/store/x") == "UNKNOWN_MEDIA"


@pytest.mark.parametrize("fields", [{"size_bytes": 6}, {"sha256": b"x" * 32}, {"sha256": b"x"}])
async def test_a_file_that_differs_from_its_description_is_rejected(tmp_path: Path, fields: dict[str, object]) -> None:
    assert await failure(make_store(tmp_path), placed(tmp_path), **fields) == "MEDIA_MISMATCH"


async def test_a_file_above_the_limit_is_rejected(tmp_path: Path) -> None:
    assert await failure(make_store(tmp_path, max_file_bytes=6), placed(tmp_path)) == "FILE_TOO_LARGE"


async def test_a_fetched_file_survives_its_deletion(tmp_path: Path) -> None:
    file = await make_store(tmp_path).fetch(reference(placed(tmp_path)))
    (tmp_path / "store" / "a.png").unlink()
    with file.open() as content:
        assert content.read() == b"content"
    file.close()


async def test_a_remote_file_is_copied_to_the_spool_folder_without_a_name(tmp_path: Path) -> None:
    content = os.urandom(3 << 20)
    with web_server(content) as url:
        store = make_store(tmp_path, allowed=(url,))
        assert await fetched(store, reference(f"{url}/a.png", sha256=hashlib.sha256(content).digest())) == content
    assert files_in(tmp_path) == []


async def test_a_remote_file_above_the_limit_is_rejected(tmp_path: Path) -> None:
    with web_server(bytes(100)) as url:
        store = make_store(tmp_path, allowed=(url,), max_file_bytes=99)
        assert await failure(store, f"{url}/a.png") == "FILE_TOO_LARGE"


async def test_an_unreachable_store_is_reported(tmp_path: Path) -> None:
    with web_server(b"") as url:
        pass
    assert await failure(make_store(tmp_path, allowed=(url,)), f"{url}/a.png") == "STORE_UNREACHABLE"


async def test_a_store_that_never_answers_delays_no_other_caller(tmp_path: Path) -> None:
    with web_server(None) as url:
        store = make_store(tmp_path, allowed=(url,))
        waiting = [asyncio.create_task(store.fetch(reference(f"{url}/{number}"))) for number in range(50)]
        assert await fetched(store, reference(placed(tmp_path))) == b"content"
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting, timeout=5)
        assert all(task.cancelled() for task in waiting)


async def test_a_cancelled_copy_writes_to_no_later_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, may_write = threading.Event(), threading.Event()

    def late_write(descriptor: int, data: bytes) -> None:
        writing.set()
        may_write.wait(10)
        os.write(descriptor, data)

    monkeypatch.setattr(store_module, "write_all", late_write)
    with web_server(b"content") as url:
        copying = asyncio.create_task(make_store(tmp_path, allowed=(url,)).fetch(reference(f"{url}/a.png")))
        await asyncio.to_thread(writing.wait, 10)
        copying.cancel()
        await asyncio.wait([copying])
    with ExitStack() as stack:
        # One of these files gets the number of the copy's descriptor.
        files = [stack.enter_context((tmp_path / str(number)).open("xb")) for number in range(20)]
        may_write.set()
        await asyncio.to_thread(join_store_threads)
        assert [os.fstat(file.fileno()).st_size for file in files] == [0] * len(files)


async def test_reading_yields_blocks_of_one_mebibyte(tmp_path: Path) -> None:
    async with aclosing(make_store(tmp_path).read(placed(tmp_path, content=bytes((2 << 20) + 1)))) as blocks:
        assert [len(block) async for block in blocks] == [1 << 20, 1 << 20, 1]


async def test_nothing_is_written_outside_the_store(tmp_path: Path) -> None:
    store = make_store(tmp_path, allowed=(str(tmp_path / "other"),))
    with raises(StagemeshError, reason="REFERENCE_NOT_ALLOWED"):
        await store.create(f"file://{tmp_path}/other/a.bin", "")


async def test_a_store_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "store").write_bytes(b"not a folder")
    store = make_store(tmp_path)
    with pytest.raises(StagemeshError) as caught:
        await store.create(store.config.uri_of("a.bin"), "")
    assert caught.value.reason in {"STORE_UNREACHABLE", "STORE_DENIED"}


async def test_folders_are_removed_by_the_prefix_of_their_names(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    for folder in ("one.1", "one.2", "one.3", "two.1", "one*"):
        writer = await store.create(store.config.uri_of("jobs", folder, "a.bin"), "application/octet-stream")
        await writer.write(b"content")
        await writer.commit()
    await store.remove_folders("jobs", prefix="one.", keep={"one.2"})
    await store.remove_folders("nothing", prefix="one.")
    assert {path.parent.name for path in files_in(tmp_path)} == {"one.2", "two.1", "one*"}


# -- calls of a store's library


@pytest.mark.parametrize(
    ("error", "is_read", "reason"),
    [
        (OSError(errno.ENOSPC, "full"), False, "STORAGE_FULL"),
        (OSError(errno.EDQUOT, "quota"), False, "STORAGE_FULL"),
        (OSError(errno.EROFS, "read-only"), False, "STORE_DENIED"),
        (PermissionError("access denied"), True, "STORE_DENIED"),
        (FileNotFoundError("a"), True, "UNKNOWN_MEDIA"),
        (FileNotFoundError("bucket"), False, "STORE_UNREACHABLE"),
        (ConnectionRefusedError(), True, "STORE_UNREACHABLE"),
        (RuntimeError("a library's own error"), True, "STORE_UNREACHABLE"),
    ],
)
async def test_an_error_of_a_library_becomes_one_of_the_catalogue(
    error: Exception, is_read: bool, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    with raises(StagemeshError, reason=reason) as caught:
        await call_store(fail, what="a.png", is_read=is_read)
    assert "a.png" in caught.value.message
    if reason != "UNKNOWN_MEDIA":
        [record] = [each for each in caplog.records if str(error) in each.getMessage()]
        assert str(error) not in caught.value.message or not str(error)
        assert reason == "STORAGE_FULL" or record.args[1] in caught.value.message  # type: ignore[index, operator]


async def test_a_call_without_an_answer_ends_in_time_and_its_late_result_is_released() -> None:
    answer, released = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def release(_: object) -> None:
        loop.call_soon_threadsafe(released.set)

    with raises(StagemeshError, reason="STORE_UNREACHABLE"):
        await call_store(answer.wait, what="a.png", timeout_s=0.05, release=release)
    answer.set()
    async with asyncio.timeout(5):
        await released.wait()


async def test_each_call_has_a_thread_that_does_not_delay_the_end_of_the_process() -> None:
    threads = await asyncio.gather(*(call_store(threading.current_thread, what="x") for _ in range(3)))
    assert len(set(threads)) == 3
    assert all(thread.daemon for thread in threads)
