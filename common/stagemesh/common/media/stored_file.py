"""One file in an object store: its writer, and the calls of the store's library.

Each call runs in its own thread, with a time limit, and raises Stagemesh's errors.
"""

import asyncio
import errno
import hashlib
import os
import threading
import uuid
from collections.abc import Callable, Generator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from stagemesh.common.errors import NotFoundError, NotReadyError, OverloadedError, StagemeshError
from stagemesh.common.process.logs import log_cause
from stagemesh.v1 import request_pb2

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem


_CALL_S = 60.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_DENIED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)

_Result = TypeVar("_Result")


async def call_store(
    function: Callable[[], _Result],
    *,
    what: str,
    is_read: bool = False,
    release: Callable[[_Result], None] | None = None,
    timeout_s: float | None = _CALL_S,
    executor: Executor | None = None,
) -> _Result:
    """Calls a blocking function in a new daemon thread, or in a thread of `executor`, and returns its result.

    - `what` names the file or the store in the errors.
    - `is_read` is True if the function reads a file whose absence is the request's fault.
    - `release` is called with the result if the caller was cancelled, or the time was up.
    - `timeout_s` is the time limit of the call in seconds, or None for no limit.

    A thread whose caller was cancelled delays neither other requests nor the end of the process. Raises
    OverloadedError (STORAGE_FULL), NotFoundError (UNKNOWN_MEDIA), NotReadyError (STORE_DENIED, STORE_UNREACHABLE), or
    the StagemeshError that the function raises.
    """
    answer = Future[_Result]()
    # Cancelling the caller cannot cancel the thread.
    answer.set_running_or_notify_cancel()

    def run() -> None:
        try:
            with _translated_errors(what, is_read=is_read):
                answer.set_result(function())
        except Exception as exc:  # noqa: BLE001 - the caller receives it
            answer.set_exception(exc)

    start = partial(_start, what=what) if executor is None else executor.submit
    start(run)
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(answer)
    except (asyncio.CancelledError, TimeoutError) as exc:
        if release is not None:
            answer.add_done_callback(
                lambda done: None if done.exception() else _start(partial(release, done.result()), what)
            )
        if isinstance(exc, TimeoutError):
            raise _unreachable(what, f"no answer for {timeout_s:g} s") from exc
        raise


def _start(function: Callable[[], None], what: str) -> None:
    threading.Thread(target=function, name=f"media {what[-40:]}", daemon=True).start()


@contextmanager
def _translated_errors(what: str, *, is_read: bool) -> Generator[None]:
    try:
        yield
    except StagemeshError:
        raise
    except OSError as exc:
        # fsspec raises FileNotFoundError for a web server that it cannot reach.
        if is_read and isinstance(exc, _MISSING) and not isinstance(exc.__cause__, OSError):
            raise NotFoundError(
                f"{what} does not exist; it may have been deleted; upload the file again, or refer to another one",
                reason="UNKNOWN_MEDIA",
            ) from exc
        cause = log_cause(exc, what=f"the store of {what}")
        if exc.errno in _FULL:
            raise OverloadedError(
                f"no space is left for {what}; the operator must free space", reason="STORAGE_FULL"
            ) from exc
        if exc.errno in _DENIED or isinstance(exc, PermissionError):
            raise NotReadyError(
                f"the store denies access to {what}; {cause}; the operator must correct its permissions, or the "
                "credentials of this service",
                reason="STORE_DENIED",
            ) from exc
        raise _unreachable(what, cause) from exc
    except Exception as exc:
        # fsspec's file systems raise the errors of their own libraries.
        raise _unreachable(what, log_cause(exc, what=f"the store of {what}")) from exc


def _unreachable(what: str, cause: str) -> NotReadyError:
    return NotReadyError(f"the store of {what} cannot be reached; {cause}; try again later", reason="STORE_UNREACHABLE")


_DISCARD_S = 2.0
# The bytes of a file that are buffered before a remote store receives them. S3 requires 5 MiB.
_BLOCK_BYTES = 8 << 20


class LocalTarget:
    """Writes to a file in the folder `temporary`, which is on the same disk as `path`, and renames it to `path`."""

    def __init__(self, path: Path, *, temporary: Path) -> None:
        self._path, self._temporary = path, temporary / uuid.uuid4().hex
        temporary.mkdir(parents=True, exist_ok=True)
        self._file = self._temporary.open("xb", buffering=0)

    def write(self, data: bytes | memoryview) -> None:
        write_all(self._file.fileno(), data)

    def commit(self) -> None:
        # Some disks report only here that they are full.
        os.fsync(self._file.fileno())
        self._file.close()
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._temporary.replace(self._path)

    def discard(self) -> None:
        self._file.close()
        try:
            self._temporary.unlink()
        except FileNotFoundError:
            self._path.unlink(missing_ok=True)


class RemoteTarget:
    """Uploads blocks to a remote store, which shows the object when the upload is completed."""

    def __init__(self, file_system: "AbstractFileSystem", uri: str) -> None:
        self._file_system, self._uri = file_system, uri
        # autocommit=False: closing the file sends its last block, but does not complete the upload.
        self._file: Any = file_system.open(uri, "wb", block_size=_BLOCK_BYTES, autocommit=False)
        self._is_committed = False

    def write(self, data: bytes | memoryview) -> None:
        # fsspec copies the whole argument, several times, before it sends any of it.
        for start in range(0, len(data), _BLOCK_BYTES):
            self._file.write(memoryview(data)[start : start + _BLOCK_BYTES])

    def commit(self) -> None:
        self._file.close()
        self._is_committed = True
        self._file.commit()

    def discard(self) -> None:
        if self._is_committed:
            self._file_system.rm_file(self._uri)
        else:
            self._file.discard()


Target: TypeAlias = LocalTarget | RemoteTarget
"""A place to which one file is written. All methods block.

`write` appends bytes. `commit` makes the whole file visible under its name. `discard` deletes the file, whether it has
been committed or not.
"""


class StoredFileWriter:
    """Writes one file to a store. Call `write` any number of times, then either `commit` or `discard`.

    Other processes see the file only after `commit`. The errors of all methods but `discard` are those of
    `MediaStore.create`. Call one method at a time.
    """

    def __init__(self, target: Target, *, uri: str, media_type: str) -> None:
        self.uri, self.media_type = uri, media_type
        self.size_bytes = 0
        """The number of bytes written so far."""
        self._target = target
        self._digest = hashlib.sha256()
        # The thread of a call that was cancelled may still use the target.
        self._lock = threading.Lock()

    @property
    def sha256(self) -> bytes:
        """The SHA-256 digest of the bytes written so far, 32 bytes."""
        return self._digest.digest()

    async def write(self, data: bytes | memoryview) -> None:
        """Appends bytes to the file."""
        await self._call(lambda: self._write(data))

    async def commit(self) -> request_pb2.MediaFile:
        """Makes the whole file visible at its URI. Returns its description."""
        await self._call(self._target.commit)
        return request_pb2.MediaFile(
            uri=self.uri, media_type=self.media_type, size_bytes=self.size_bytes, sha256=self.sha256
        )

    async def discard(self) -> None:
        """Deletes what has been written, also after a `commit` that failed or was cancelled. Never raises an error.

        Waits at most 2 seconds. If the store is slower, the file is deleted later.
        """
        with suppress(StagemeshError, TimeoutError):
            async with asyncio.timeout(_DISCARD_S):
                await self._call(self._target.discard)

    def _write(self, data: bytes | memoryview) -> None:
        self._target.write(data)
        self._digest.update(data)
        self.size_bytes += len(data)

    async def _call(self, method: Callable[[], None]) -> None:
        def locked() -> None:
            with self._lock:
                method()

        await call_store(locked, what=self.uri)


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Writes all bytes to an open file. Raises OSError if the disk is full."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]
