import asyncio
import errno
import threading

import pytest

from stagemesh.common.errors import StagemeshError
from stagemesh.common.media.stored_file import call_store


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
async def test_an_error_of_a_library_becomes_one_of_the_catalogue(error: Exception, is_read: bool, reason: str) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(StagemeshError) as caught:
        await call_store(fail, what="a.png", is_read=is_read)
    assert caught.value.reason == reason
    assert "a.png" in caught.value.message


async def test_a_call_without_an_answer_ends_in_time_and_its_late_result_is_released() -> None:
    answer, released = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def release(_: object) -> None:
        loop.call_soon_threadsafe(released.set)

    with pytest.raises(StagemeshError) as caught:
        await call_store(answer.wait, what="a.png", timeout_s=0.05, release=release)
    assert caught.value.reason == "STORE_UNREACHABLE"
    answer.set()
    async with asyncio.timeout(5):
        await released.wait()


async def test_each_call_has_a_thread_that_does_not_delay_the_end_of_the_process() -> None:
    threads = await asyncio.gather(*(call_store(threading.current_thread, what="x") for _ in range(3)))
    assert len(set(threads)) == 3
    assert all(thread.daemon for thread in threads)
