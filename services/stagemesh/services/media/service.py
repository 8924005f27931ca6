"""The process that serves MediaService: its servicer, the uploads, and their quota."""

import asyncio
import hashlib
import logging
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing

from stagemesh.common.errors import DeadlineError, InvalidRequestError, OverloadedError, StagemeshError
from stagemesh.common.media.files import MEDIA_PART_BYTES, check_content, suffix_of
from stagemesh.common.media.store import MediaStore
from stagemesh.common.media.stored_file import StoredFileWriter
from stagemesh.common.process import settings
from stagemesh.common.process.media_config import MediaServiceConfig
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
    """The uploads of one caller, while some of them run in this process."""

    def __init__(self, store: MediaStore, folder: str) -> None:
        """`folder` is the folder of the caller's files in the store."""
        self._store, self._folder = store, folder
        self.running = set[str]()
        """The names of the files whose uploads run."""
        self._sizes = dict[str, int]()
        """The sizes in bytes of these files and of those in the store, by name."""

    async def begin(self, name: str) -> None:
        """Begins an upload. Deletes expired files, and counts those in the store again."""
        self.running.add(name)
        earlier = self._sizes.keys() - self.running
        stored = await self._store.remove_old_files(self._folder, age_s=self._store.config.keep_uploads_s)
        # The files of uploads that have ended meanwhile may be missing in `stored`.
        later = {each: size_bytes for each, size_bytes in self._sizes.items() if each not in earlier}
        self._sizes = {**stored, **later}

    def count(self, name: str, size_bytes: int) -> None:
        """Sets the size of an upload. Raises OverloadedError (STORAGE_FULL) if there are too many files or bytes."""
        self._sizes[name] = size_bytes
        config, files, total_bytes = self._store.config, len(self._sizes), sum(self._sizes.values())
        if files > config.max_uploads or total_bytes > config.max_upload_bytes:
            raise OverloadedError(
                f"the uploads of this caller would be {files} files with {total_bytes} bytes; the limits are "
                f"{config.max_uploads} (media.max_uploads) and {config.max_upload_bytes} (media.max_upload_bytes); "
                f"upload again when older files have expired, each after {config.keep_uploads_s:g} s",
                reason="STORAGE_FULL",
            )

    def end(self, name: str, *, is_stored: bool) -> None:
        """Ends an upload."""
        self.running.discard(name)
        if not is_stored:
            self._sizes.pop(name, None)


class Upload:
    """Stores one file from the messages of an UploadMedia call. Use it within `contextlib.aclosing`, which discards the
    file unless `finish` has succeeded.
    """

    def __init__(self, store: MediaStore, *, caller: str, callers: dict[str, CallerUploads]) -> None:
        """`callers` has the uploads of the callers whose uploads run, by the names of their folders."""
        self._store, self._callers = store, callers
        # Others may know the URI of a file, which does not contain the name of its owner.
        self._folder = f"{_FOLDER}/{hashlib.blake2b(caller.encode(), digest_size=8).hexdigest()}"
        self._name = ""
        self._uploads: CallerUploads | None = None
        self._stated = request_pb2.MediaFile()
        """The properties of the whole file that the client states."""
        self._writer: StoredFileWriter | None = None
        self._is_complete = self._is_stored = False

    async def add(self, message: media_pb2.UploadMediaRequest) -> None:
        """Writes the part of a file that a message contains.

        Raises InvalidRequestError if the part is invalid (INVALID_MEDIA) or the file is too large (FILE_TOO_LARGE), and
        the errors of `CallerUploads.count` and `MediaStore.create`.
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
        if self._uploads is None:
            self._name = f"{uuid.uuid4().hex}{suffix_of(part.media_type)}"
            self._uploads = self._callers.setdefault(self._folder, CallerUploads(self._store, self._folder))
            await self._uploads.begin(self._name)
        self._uploads.count(self._name, needed_bytes)
        if self._writer is None:
            uri = self._store.config.uri_of(self._folder, self._name)
            self._writer = await self._store.create(uri, part.media_type)
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
            self._uploads.end(self._name, is_stored=self._is_stored)
            if not self._uploads.running:
                del self._callers[self._folder]
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


SERVICE_NAME = media_pb2.DESCRIPTOR.services_by_name["MediaService"].full_name
_PART_S = 60.0
_GRACE_S = 10.0


async def serve(config: MediaServiceConfig, stopping: asyncio.Event) -> None:
    """Serves MediaService until `stopping` is set. Running transfers then have 10 seconds to end.

    The health service reports "" and MediaService as SERVING while the process accepts calls.
    """
    store = MediaStore(config.media, writer=f"{config.pipeline}.{config.name}", spool=settings.spool_dir())
    store.prepare()
    server = Server.of_process(config.listen, config, roles={CLIENT}, calls_per_caller=CALLS_PER_CALLER)
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

    async def UploadMedia(  # noqa: N802
        self,
        request_iterator: AsyncIterator[media_pb2.UploadMediaRequest],
        context: Context,  # noqa: ARG002
    ) -> media_pb2.UploadMediaResponse:
        async with aclosing(Upload(self._store, caller=caller_of(claimed=""), callers=self._uploads)) as upload:
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
