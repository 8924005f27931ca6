"""The process that serves MediaService: its servicer, the uploads, and their quota."""

import asyncio
import hashlib
import logging
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from stagemesh.common.errors import DeadlineError, InvalidRequestError, OverloadedError, StagemeshError
from stagemesh.common.media.files import MEDIA_PART_BYTES, check_content, suffix_of
from stagemesh.common.media.store import MediaStore
from stagemesh.common.media.stored_file import StoredFileWriter
from stagemesh.common.process import settings
from stagemesh.common.process.media_config import MediaConfig, MediaServiceConfig
from stagemesh.common.tasks import end_tasks
from stagemesh.rpc.call_limits import CALLS_PER_CALLER
from stagemesh.rpc.callers import CLIENT, caller_of
from stagemesh.rpc.handlers import Context, answered, streaming
from stagemesh.rpc.server import Server
from stagemesh.v1 import media_pb2, media_pb2_grpc, request_pb2

_FOLDER = "uploads"
_SWEEP_S = 600.0
_log = logging.getLogger(__name__)


class CallerUploads:
    """The uploads of one caller that are in the store, or run in this process."""

    def __init__(self, sizes: Sequence[int]) -> None:
        """Begins with files of these sizes in bytes."""
        self.files, self.size_bytes, self.running = len(sizes), sum(sizes), 0

    def check(self, config: MediaConfig) -> None:
        """Raises OverloadedError (STORAGE_FULL) if there are too many files or bytes."""
        if self.files > config.max_uploads or self.size_bytes > config.max_upload_bytes:
            raise OverloadedError(
                f"the uploads of this caller would be {self.files} files with {self.size_bytes} bytes; the limits are "
                f"{config.max_uploads} (media.max_uploads) and {config.max_upload_bytes} (media.max_upload_bytes); "
                f"upload again when older files have expired, each after {config.keep_uploads_s:g} s",
                reason="STORAGE_FULL",
            )


class Upload:
    """Stores one file from the messages of an UploadMedia call. Use it within `contextlib.aclosing`, which discards the
    file unless `finish` has succeeded.
    """

    def __init__(self, store: MediaStore, *, caller: str, running: dict[str, CallerUploads]) -> None:
        """`running` has the uploads of the callers whose uploads run, by the names of their folders."""
        self._store, self._running = store, running
        # Others may know the URI of a file, which does not contain the name of its owner.
        self._folder = f"{_FOLDER}/{hashlib.blake2b(caller.encode(), digest_size=8).hexdigest()}"
        self._uploads: CallerUploads | None = None
        self._counted_bytes = 0
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
        needed_bytes = max(self._stated.size_bytes, size_bytes + len(part.data))
        if needed_bytes > limit_bytes:
            raise InvalidRequestError(
                f"the file has over {limit_bytes} bytes, the pipeline's media.max_file_bytes; upload a smaller one",
                reason="FILE_TOO_LARGE",
                metadata={"limit_bytes": str(limit_bytes)},
            )
        await self._count(needed_bytes)
        if self._writer is None:
            name = f"{uuid.uuid4().hex}{suffix_of(part.media_type)}"
            self._writer = await self._store.create(self._store.config.uri_of(self._folder, name), part.media_type)
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

    async def aclose(self) -> None:
        """Discards the file unless `finish` has succeeded."""
        if self._uploads is not None:
            self._uploads.running -= 1
            if not self._is_stored:
                self._uploads.files -= 1
                self._uploads.size_bytes -= self._counted_bytes
            if not self._uploads.running:
                del self._running[self._folder]
        if self._writer is not None and not self._is_stored:
            await self._writer.discard()

    async def _count(self, size_bytes: int) -> None:
        """Counts `size_bytes` for this upload. Raises the errors of `CallerUploads.check` and of the store."""
        if self._uploads is None:
            if self._folder not in self._running:
                sizes = await self._store.remove_old_files(self._folder, age_s=self._store.config.keep_uploads_s)
                self._running.setdefault(self._folder, CallerUploads(sizes))
            self._uploads = self._running[self._folder]
            self._uploads.running += 1
            self._uploads.files += 1
        self._uploads.size_bytes += size_bytes - self._counted_bytes
        self._counted_bytes = size_bytes
        self._uploads.check(self._store.config)

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


SERVICE_NAME = media_pb2.DESCRIPTOR.services_by_name["MediaService"].full_name
_PART_S = 60.0
_GRACE_S = 10.0


async def serve(config: MediaServiceConfig, stopping: asyncio.Event) -> None:
    """Serves MediaService until `stopping` is set. Running transfers then have 10 seconds to end.

    The health service reports "" and MediaService as SERVING while the process accepts calls.
    """
    store = MediaStore(config.media, writer=f"{config.pipeline}.{config.name}", spool=settings.spool_dir())
    store.check_packages()
    store.sweep()
    server = Server.of_process(
        config.listen, config, roles={CLIENT}, tokens=config.tokens, calls_per_caller=CALLS_PER_CALLER
    )
    server.add(SERVICE_NAME, media_pb2_grpc.add_MediaServiceServicer_to_server, MediaServicer(store))
    async with server.serving(grace_s=_GRACE_S):
        server.set_health("", SERVICE_NAME, serving=True)
        removing = asyncio.create_task(_remove_old_uploads(store), name="remove old uploads")
        await stopping.wait()
        await end_tasks([removing])


async def _remove_old_uploads(store: MediaStore) -> None:
    while True:
        try:
            await store.remove_old_files(_FOLDER, age_s=store.config.keep_uploads_s)
        except StagemeshError as exc:
            _log.warning("old uploads remain in the store: %s", exc.message)
        await asyncio.sleep(_SWEEP_S)


@answered
class MediaServicer(media_pb2_grpc.MediaServiceServicer):
    """The servicer of MediaService for one store."""

    def __init__(self, store: MediaStore) -> None:
        self._store = store
        self._uploads = dict[str, CallerUploads]()
        self.where: dict[str, str] = {}

    async def UploadMedia(  # noqa: N802
        self,
        request_iterator: AsyncIterator[media_pb2.UploadMediaRequest],
        context: Context,  # noqa: ARG002
    ) -> media_pb2.UploadMediaResponse:
        async with aclosing(Upload(self._store, caller=caller_of(claimed=""), running=self._uploads)) as upload:
            while (message := await _next(request_iterator)) is not None:
                await upload.add(message)
            return media_pb2.UploadMediaResponse(file=await upload.finish())

    @streaming
    async def DownloadMedia(  # noqa: N802
        self,
        request: media_pb2.DownloadMediaRequest,
        context: Context,  # noqa: ARG002
    ) -> AsyncIterator[media_pb2.DownloadMediaResponse]:
        offset = request.offset
        async with aclosing(self._store.read(request.uri, offset=offset)) as blocks:
            async for block in blocks:
                yield media_pb2.DownloadMediaResponse(media=request_pb2.Media(data=block, offset=offset))
                offset += len(block)
        yield media_pb2.DownloadMediaResponse(media=request_pb2.Media(offset=offset, last=True))


async def _next(messages: AsyncIterator[media_pb2.UploadMediaRequest]) -> media_pb2.UploadMediaRequest | None:
    """Returns the next message, or None at the end. Raises DeadlineError if none arrives for 60 seconds."""
    try:
        async with asyncio.timeout(_PART_S):
            return await anext(messages, None)
    except TimeoutError as exc:
        raise DeadlineError(f"no part of the upload arrived for {_PART_S:g} s; upload the file again") from exc
