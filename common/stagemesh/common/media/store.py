"""The object store for media: a folder, or a remote store that fsspec supports."""

import errno
import glob
import hashlib
import os
import shutil
import stat
import tempfile
import time
from collections.abc import AsyncGenerator, Collection, Mapping
from contextlib import aclosing, closing, suppress
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from urllib.parse import quote

from stagemesh.common.errors import InvalidRequestError, NotReadyError, PermissionDeniedError
from stagemesh.common.media.files import MEDIA_PART_BYTES, check_content
from stagemesh.common.media.stored_file import (
    LocalTarget,
    RemoteTarget,
    StoredFileWriter,
    Target,
    call_store,
    write_all,
)
from stagemesh.common.process.media_config import LOCAL, Location, MediaConfig, parse_root
from stagemesh.v1 import request_pb2

if TYPE_CHECKING:
    from aiohttp import ClientResponse
    from fsspec import AbstractFileSystem

_PARTIAL = ".partial"
_READ_BLOCK_BYTES = 4 << 20
_WEB = frozenset({"http", "https"})


class MediaStore:
    """Reads the media files that requests may refer to, and writes files to the store.

    - `writer` is a name that no other running process has, such as a replica's name. Unfinished files of the writer are
      in a folder of their own below the store's root.
    - `spool` is a folder for copies of remote files. It should be on a disk rather than in memory.

    A store that is slow or unreachable delays only the caller that waits for it. A caller can be cancelled at any time.
    """

    def __init__(self, config: MediaConfig, *, writer: str, spool: Path) -> None:
        self.config = config
        self._writer, self._spool = writer, spool

    def prepare(self) -> None:
        """Deletes the unfinished files that an earlier process with the same writer's name left in a folder. A remote
        store does not show unfinished files.

        Raises NotReadyError (MISSING_MODULE) if a Python package that a root needs is not installed.
        """
        for root in map(parse_root, self.config.roots):
            if root.protocol != LOCAL:
                self._file_system(root)
        if self.config.store and parse_root(self.config.store).protocol == LOCAL:
            shutil.rmtree(self._partial_folder, ignore_errors=True)

    async def fetch(self, reference: request_pb2.MediaFile) -> "FetchedFile":
        """Opens the file at `reference.uri`, and compares its size and its digest with `reference` if they are set.

        A remote file is copied to the spool folder first, so that its reader never waits for the store. The caller
        closes the result. Raises:

        - PermissionDeniedError (REFERENCE_NOT_ALLOWED) if the file is outside the allowed roots.
        - NotFoundError (UNKNOWN_MEDIA) if it does not exist.
        - InvalidRequestError if it is too large (FILE_TOO_LARGE), or differs from the reference (MEDIA_MISMATCH).
        - NotReadyError if the store is unreachable (STORE_UNREACHABLE) or denies the access (STORE_DENIED).
        - OverloadedError (STORAGE_FULL) if the spool folder's disk is full.
        """
        location = self.config.located(reference.uri)
        is_local = location.protocol == LOCAL
        what = location.uri if is_local else "a copy of the file"
        make_file = (lambda: FetchedFile(self._open_local(location))) if is_local else self._make_copy
        file = await call_store(make_file, what=what, is_read=is_local, release=FetchedFile.close)
        try:
            if not is_local:
                await self._copy(location, file)
            self._check_size(location, file.size_bytes)
            await _check_content(reference, file)
        except BaseException:
            file.close()
            raise
        return file

    async def read(self, uri: str, *, offset: int = 0) -> AsyncGenerator[bytes]:
        """Yields the content of a file from an offset on, in blocks of at most 1 MiB. Iterate within
        `contextlib.aclosing`.

        Raises the errors of `fetch` about the location and the store.
        """
        location = self.config.located(uri)
        file = await call_store(lambda: self._open(location), what=uri, is_read=True, release=_close)
        try:
            if offset:
                await call_store(lambda: file.seek(min(offset, file.seek(0, os.SEEK_END))), what=uri, is_read=True)
            while block := await call_store(lambda: file.read(MEDIA_PART_BYTES), what=uri, is_read=True):
                yield block
        finally:
            _close(file)

    async def create(self, uri: str, media_type: str) -> StoredFileWriter:
        """Begins a file in the store. It becomes visible at `uri` when it is committed.

        Raises PermissionDeniedError (REFERENCE_NOT_ALLOWED) if `uri` is outside the store, OverloadedError
        (STORAGE_FULL) if the store is full, and NotReadyError if it is unreachable (STORE_UNREACHABLE) or does not
        permit to write (STORE_DENIED).
        """
        location = self.config.located(uri)
        if not self.config.store or not parse_root(self.config.store).contains(location):
            raise PermissionDeniedError(
                f"{uri[:200]} is not in the store; write below {self.config.store or 'media.store, which is not set'}",
                reason="REFERENCE_NOT_ALLOWED",
            )
        target = await call_store(lambda: self._make_target(location), what=uri, release=lambda each: each.discard())
        return StoredFileWriter(target, uri=uri, media_type=media_type)

    async def remove_folders(self, parent: str, *, prefix: str, keep: Collection[str] = ()) -> None:
        """Deletes the folders in the store's folder `parent` whose names begin with `prefix`, except those in `keep`.

        Idempotent. Raises the errors of `create` about the store.
        """
        root = parse_root(self.config.store)
        await call_store(lambda: self._remove_folders(root, parent, prefix, keep), what=f"{root.uri}/{parent}")

    async def remove_old_files(self, folder: str, *, age_s: float) -> Mapping[str, int]:
        """Deletes the files in a folder of the store, and below it, that were stored more than `age_s` seconds ago.

        Returns the sizes of the other files in bytes, by their names without their folders. Raises the errors of
        `create` about the store.
        """
        remove = partial(self._remove_old_files, folder, time.time() - age_s)
        return await call_store(remove, what=f"{self.config.store}/{folder}")

    # -- internals, which block

    def _remove_folders(self, root: Location, parent: str, prefix: str, keep: Collection[str]) -> None:
        file_system = self._file_system(root)
        # Another process may have changed the store since this one has listed it.
        file_system.invalidate_cache()
        for path in file_system.glob(f"{glob.escape(f'{root.uri}/{parent}/{prefix}')}*"):
            if path.rpartition("/")[2] not in keep:
                file_system.rm(path, recursive=True)

    def _remove_old_files(self, folder: str, oldest_s: float) -> Mapping[str, int]:
        root = parse_root(self.config.store)
        file_system = self._file_system(root)
        # Another process may have changed the store since this one has listed it.
        file_system.invalidate_cache()
        sizes, old = dict[str, int](), list[str]()
        for path, found in file_system.find(f"{root.uri}/{folder}", detail=True).items():
            # Another process may delete a file meanwhile, and some stores know no times.
            with suppress(FileNotFoundError, IsADirectoryError, NotImplementedError):
                sizes[name := path.rpartition("/")[2]] = found["size"]
                if file_system.modified(path).timestamp() < oldest_s:
                    old.append(path)
                    del sizes[name]
        for path in old:
            with suppress(FileNotFoundError):
                file_system.rm_file(path)
        return sizes

    @property
    def _partial_folder(self) -> Path:
        return Path(parse_root(self.config.store).path, _PARTIAL, quote(self._writer, safe=""))

    def _make_target(self, location: Location) -> Target:
        if location.protocol == LOCAL:
            return LocalTarget(Path(location.path), temporary=self._partial_folder)
        return RemoteTarget(self._file_system(location), location.uri)

    def _make_copy(self) -> "FetchedFile":
        self._spool.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=self._spool) as file:
            return FetchedFile(os.dup(file.fileno()))

    def _open(self, location: Location) -> BinaryIO:
        if location.protocol == LOCAL:
            return os.fdopen(self._open_local(location), "rb", buffering=0)
        # Files are read from start to end, for which a cache of one block is enough.
        return self._file_system(location).open(
            location.uri, "rb", block_size=_READ_BLOCK_BYTES, cache_type="readahead"
        )

    def _open_local(self, location: Location) -> int:
        """Opens a local file and returns its descriptor.

        Raises PermissionDeniedError (REFERENCE_NOT_ALLOWED) if a symbolic link leads out of the allowed roots.
        """
        # O_NONBLOCK: opening a named pipe does not wait for its writer.
        descriptor = os.open(location.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            self._check_open_file(descriptor, location)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _check_open_file(self, descriptor: int, location: Location) -> None:
        # The path of the open file cannot change between the check and the use.
        actual = Location(LOCAL, str(Path(_by_descriptor(descriptor)).readlink()))
        roots = map(parse_root, self.config.roots)
        real = [root._replace(path=os.path.realpath(root.path)) for root in roots if root.protocol == LOCAL]
        if not any(root.contains(actual) for root in real):
            raise PermissionDeniedError(
                f"{location.uri} leads to a file outside the allowed roots; refer to a file below one of them",
                reason="REFERENCE_NOT_ALLOWED",
            )
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise IsADirectoryError(errno.EISDIR, "not a regular file")

    def _file_system(self, location: Location) -> "AbstractFileSystem":
        options: dict[str, Any] = {**self.config.storage_options.get(location.protocol, {})}
        if location.protocol in _WEB:
            # A redirection could lead out of the root.
            session = {**options.get("client_kwargs", {}), "raise_for_status": _refuse_redirection}
            options |= {"allow_redirects": False, "client_kwargs": session}
        try:
            import fsspec

            return fsspec.filesystem(location.protocol, **options)
        except ImportError as exc:
            raise NotReadyError(
                f"{location.protocol}:// needs a Python package that is not installed: {exc}", reason="MISSING_MODULE"
            ) from exc

    async def _copy(self, location: Location, copy: "FetchedFile") -> None:
        async with aclosing(self.read(location.uri)) as blocks:
            async for block in blocks:
                self._check_size(location, copy.size_bytes + len(block))
                await call_store(partial(copy.duplicate().append, block), what="a copy of the file")

    def _check_size(self, location: Location, size_bytes: int) -> None:
        limit_bytes = self.config.max_file_bytes
        if size_bytes > limit_bytes:
            raise InvalidRequestError(
                f"{location.uri} has more than {limit_bytes} bytes, the pipeline's media.max_file_bytes; refer to a "
                "smaller file",
                reason="FILE_TOO_LARGE",
                metadata={"limit_bytes": str(limit_bytes)},
            )


class FetchedFile:
    """An open local file with the content of a media file. Deleting or replacing its name does not affect it."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @property
    def size_bytes(self) -> int:
        """The size of the file in bytes."""
        return os.fstat(self._descriptor).st_size

    def open(self) -> BufferedReader:
        """Returns a new reader, at the start of the file. Readers are independent, and remain usable after `close`."""
        return Path(_by_descriptor(self._descriptor)).open("rb")

    def duplicate(self) -> "FetchedFile":
        """Returns the same open file with its own descriptor, for a thread that may outlast this object."""
        return FetchedFile(os.dup(self._descriptor))

    def append(self, block: bytes) -> None:
        """Appends bytes to a duplicate, and closes it. Raises OSError if the disk is full."""
        with closing(self):
            write_all(self._descriptor, block)

    def digest(self) -> bytes:
        """Returns the SHA-256 digest of a duplicate, and closes it."""
        with closing(self), self.open() as content:
            return hashlib.file_digest(content, "sha256").digest()

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


async def _check_content(reference: request_pb2.MediaFile, file: FetchedFile) -> None:
    sha256 = b""
    if reference.sha256:
        sha256 = await call_store(file.duplicate().digest, what=reference.uri, timeout_s=None)
    check_content(reference, size_bytes=file.size_bytes, sha256=sha256)


async def _refuse_redirection(response: "ClientResponse") -> None:
    if response.status in range(300, 400):
        raise OSError(f"{response.url} is a redirection, which is not followed")


def _by_descriptor(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _close(file: BinaryIO) -> None:
    with suppress(Exception):
        file.close()
