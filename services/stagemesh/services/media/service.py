"""The process that serves MediaService, and its servicer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc

from stagemesh.common import settings
from stagemesh.common.errors import DeadlineError
from stagemesh.common.media_config import MediaServiceConfig
from stagemesh.rpc.authentication import TokenChecker
from stagemesh.rpc.call_limits import CALLS_PER_CALLER
from stagemesh.rpc.credentials import PROCESS, Credentials
from stagemesh.rpc.handlers import answered, streaming
from stagemesh.rpc.roles import CLIENT
from stagemesh.rpc.server import Server
from stagemesh.services.media.store import MediaStore
from stagemesh.services.media.upload import Upload
from stagemesh.v1 import media_pb2, media_pb2_grpc, request_pb2

SERVICE_NAME = media_pb2.DESCRIPTOR.services_by_name["MediaService"].full_name
_PART_S = 60.0
_GRACE_S = 10.0

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"


async def serve(config: MediaServiceConfig, stopping: asyncio.Event) -> None:
    """Serves MediaService until `stopping` is set. Running transfers then have 10 seconds to end.

    The health service reports "" and MediaService as SERVING while the process accepts calls.
    """
    store = MediaStore(config.media, writer=f"{config.pipeline}.{config.name}", spool=settings.spool_dir())
    store.check_packages()
    store.sweep()
    PROCESS.use(Credentials(config.tls))
    tokens = None if config.tokens is None else TokenChecker(config.tokens)
    server = Server(
        config.listen,
        roles={CLIENT},
        tokens=tokens,
        health_listen=config.health_listen,
        calls_per_caller=CALLS_PER_CALLER,
    )
    media_pb2_grpc.add_MediaServiceServicer_to_server(MediaServicer(store), server.grpc)
    server.reflect(SERVICE_NAME)
    await server.start()
    for name in ("", SERVICE_NAME):
        server.set_health(name, serving=True)
    try:
        await stopping.wait()
    finally:
        await server.stop(grace_s=_GRACE_S)


@answered
class MediaServicer(media_pb2_grpc.MediaServiceServicer):
    """The servicer of MediaService for one store."""

    def __init__(self, store: MediaStore) -> None:
        self._store = store
        self.where: dict[str, str] = {}

    async def UploadMedia(  # noqa: N802
        self,
        request_iterator: AsyncIterator[media_pb2.UploadMediaRequest],
        context: _Context,  # noqa: ARG002
    ) -> media_pb2.UploadMediaResponse:
        async with Upload(self._store) as upload:
            while (message := await _next(request_iterator)) is not None:
                await upload.add(message)
            return media_pb2.UploadMediaResponse(file=await upload.finish())

    @streaming
    async def DownloadMedia(  # noqa: N802
        self,
        request: media_pb2.DownloadMediaRequest,
        context: _Context,  # noqa: ARG002
    ) -> AsyncIterator[media_pb2.DownloadMediaResponse]:
        offset = 0
        async with aclosing(self._store.read(request.uri)) as blocks:
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
