"""One upload: a file that arrives in parts and is stored under a new name."""

import uuid
from types import TracebackType
from typing import Self

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.media_checks import check_content
from stagemesh.common.media_types import suffix_of
from stagemesh.rpc.channels import MEDIA_PART_BYTES
from stagemesh.services.media.store import MediaStore
from stagemesh.services.media.stored_file import StoredFileWriter
from stagemesh.v1 import media_pb2, request_pb2

_FOLDER = "uploads"


class Upload:
    """Stores one file from the messages of an UploadMedia call. Use it within `async with`, which discards the file
    unless `finish` has succeeded.
    """

    def __init__(self, store: MediaStore) -> None:
        self._store = store
        self._stated = request_pb2.MediaFile()
        """The properties of the whole file that the client states."""
        self._writer: StoredFileWriter | None = None
        self._is_complete = self._is_stored = False

    async def add(self, message: media_pb2.UploadMediaRequest) -> None:
        """Writes the part of a file that a message contains.

        Raises InvalidRequestError if the part is invalid (INVALID_MEDIA) or the file is too large (FILE_TOO_LARGE), and
        the errors of `MediaStore.create`.
        """
        part = message.media
        if self._writer is None:
            self._stated.size_bytes, self._stated.media_type = message.size_bytes, part.media_type
        self._stated.sha256 = message.sha256 or self._stated.sha256
        size_bytes = self._writer.size_bytes if self._writer is not None else 0
        self._check(part, size_bytes)
        limit_bytes = self._store.config.max_file_bytes
        if max(self._stated.size_bytes, size_bytes + len(part.data)) > limit_bytes:
            raise InvalidRequestError(
                f"the file has over {limit_bytes} bytes, the pipeline's media.max_file_bytes; upload a smaller one",
                reason="FILE_TOO_LARGE",
                metadata={"limit_bytes": str(limit_bytes)},
            )
        if self._writer is None:
            name = f"{uuid.uuid4().hex}{suffix_of(part.media_type)}"
            self._writer = await self._store.create(self._store.config.uri_of(_FOLDER, name), part.media_type)
        await self._writer.write(part.data)
        self._is_complete = part.last

    async def finish(self) -> request_pb2.MediaFile:
        """Makes the file visible, and returns its description.

        Raises InvalidRequestError if the file is incomplete or empty (INVALID_MEDIA), or is not the one that the client
        stated (MEDIA_MISMATCH), and the errors of `MediaStore.create`.
        """
        writer = self._writer
        if writer is None or not self._is_complete or not writer.size_bytes:
            raise _invalid("is empty" if self._is_complete else "ended without a part that has `last`")
        check_content(self._stated, size_bytes=writer.size_bytes, sha256=writer.sha256)
        file = await writer.commit()
        self._is_stored = True
        return file

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._writer is not None and not self._is_stored:
            await self._writer.discard()

    def _check(self, part: request_pb2.Media, size_bytes: int) -> None:
        if self._is_complete:
            raise _invalid("continues after the part that has `last`")
        if part.offset != size_bytes:
            raise _invalid(f"has a part with offset {part.offset} after {size_bytes} bytes")
        if len(part.data) > MEDIA_PART_BYTES:
            raise _invalid(f"has a part of {len(part.data)} bytes; a part may have {MEDIA_PART_BYTES}")


def _invalid(problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"the upload {problem}; send the whole file in parts, in order, and `last` with the last one",
        reason="INVALID_MEDIA",
    )
