"""Uploads and downloads of media files: the messages of an upload, and the local file of a download."""

import hashlib
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias
from uuid import uuid4

import grpc.aio

from stagemesh.client.content import MediaFile, media_type_of
from stagemesh.common.errors import InvalidRequestError, UnsupportedError, file_access, writing
from stagemesh.common.media.files import MEDIA_PART_BYTES, check_content
from stagemesh.rpc import channels
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import media_pb2, orchestrator_pb2, request_pb2
from stagemesh.v1.media_pb2_grpc import MediaServiceStub

if TYPE_CHECKING:
    from stagemesh.client.clients import AsyncClient

OnBytes: TypeAlias = Callable[[int], None]
"""A function that is called during a transfer with the number of bytes transferred so far."""


# The ping timeout is longer than between services, because client machines may be loaded and client links slow.
CHANNEL_OPTIONS = tuple({**dict(channels.CHANNEL_OPTIONS), "grpc.http2.ping_timeout_ms": 2000}.items())


class ServiceAddress(NamedTuple):
    """The address of a service ("host:port"), and the name in its TLS certificate.

    The name is empty if it is the host of the address.
    """

    endpoint: str
    server_name: str

    @property
    def options(self) -> channels.ChannelOptions:
        """The options of a channel to the service."""
        return channels.named_options(CHANNEL_OPTIONS, self.server_name)


def media_address(pipeline: orchestrator_pb2.DescribePipelineResponse) -> ServiceAddress:
    """Returns the address of a pipeline's media service. Raises UnsupportedError if the pipeline has none."""
    if not pipeline.media_endpoint:
        raise UnsupportedError(
            f"pipeline {pipeline.pipeline!r} has no media service; send the file in the request, or ask the operator "
            "to add `media:` with a store to the pipeline file"
        )
    return ServiceAddress(pipeline.media_endpoint, pipeline.media_server_name)


async def stream_file(
    client: "AsyncClient", file: MediaFile | str, *, offset: int = 0, timeout_s: float | None = None
) -> AsyncGenerator[media_pb2.DownloadMediaResponse]:
    """Yields the parts of a stored file from the byte `offset` to the end.

    Close the generator (`contextlib.aclosing`) if you stop before its end. Otherwise, the call stays open.

    An older media service yields the parts before the offset, too.

    Raises NotFoundError (UNKNOWN_MEDIA) if there is no such file, and the errors of `media_address`.
    """
    address = media_address(await client.describe())
    request = media_pb2.DownloadMediaRequest(uri=file if isinstance(file, str) else file.uri, offset=offset)
    async with channels.open_async(address.endpoint, client.credentials, address.options) as channel:
        try:
            async for response in MediaServiceStub(channel).DownloadMedia(request, timeout=timeout_s):
                yield response
        except grpc.aio.AioRpcError as exc:
            raise from_rpc_error(exc, peer=f"the media service at {address.endpoint}") from exc


class UploadMessages:
    """The messages that upload a file, in order. They can be iterated once.

    Raises InvalidRequestError (INVALID_MEDIA) if the file cannot be read or is empty, or if `media_type` is None and
    the suffix of its name is unknown.
    """

    def __init__(self, path: Path | str, *, media_type: str | None, on_bytes: OnBytes | None) -> None:
        self._path, self._on_bytes = Path(path), on_bytes
        self._media_type = media_type or media_type_of(self._path)
        self.error: InvalidRequestError | None = None
        """The error that ended the iteration, or None. Stored here because gRPC does not pass it on."""
        with file_access(f"cannot read {path}", reason="INVALID_MEDIA"):
            self._size_bytes = self._path.stat().st_size
        if not self._size_bytes:
            raise InvalidRequestError(f"{path} is empty; name a file with content", reason="INVALID_MEDIA")

    def __iter__(self) -> Iterator[media_pb2.UploadMediaRequest]:
        digest, offset, last = hashlib.sha256(), 0, False
        try:
            problem = f"cannot read {self._path}"
            with file_access(problem, reason="INVALID_MEDIA"), self._path.open("rb", buffering=0) as file:
                while not last:
                    data = file.read(MEDIA_PART_BYTES)
                    digest.update(data)
                    last = not data or offset + len(data) >= self._size_bytes
                    media = request_pb2.Media(media_type=self._media_type, data=data, offset=offset, last=last)
                    yield media_pb2.UploadMediaRequest(
                        media=media, size_bytes=self._size_bytes, sha256=digest.digest() if last else b""
                    )
                    offset += len(data)
                    if self._on_bytes is not None:
                        self._on_bytes(offset)
        except InvalidRequestError as exc:
            self.error = exc
            raise


class Download(AbstractContextManager["Download"]):
    """The local file of a download. Use it within `with`, which deletes the partial file unless `finish` succeeds.

    The constructor and the methods raise InvalidRequestError (CANNOT_WRITE) if the file cannot be written.
    """

    def __init__(self, file: MediaFile | str, path: Path | str, *, on_bytes: OnBytes | None) -> None:
        stated = MediaFile(file, "") if isinstance(file, str) else file
        self._stated = request_pb2.MediaFile(uri=stated.uri, size_bytes=stated.size_bytes, sha256=stated.sha256)
        self._path, self._on_bytes = Path(path), on_bytes
        self._temporary = self._path.with_name(f".{self._path.name}.{uuid4().hex}.part")
        self._digest, self._size_bytes, self._is_complete = hashlib.sha256(), 0, False
        with writing(self._path):
            self._file = self._temporary.open("xb", buffering=0)

    @property
    def request(self) -> media_pb2.DownloadMediaRequest:
        """The request that starts the download."""
        return media_pb2.DownloadMediaRequest(uri=self._stated.uri)

    def add(self, response: media_pb2.DownloadMediaResponse) -> None:
        """Writes the next part of the file."""
        data = response.media.data
        with writing(self._path):
            self._file.write(data)
        self._digest.update(data)
        self._size_bytes += len(data)
        self._is_complete = response.media.last
        if self._on_bytes is not None:
            self._on_bytes(self._size_bytes)

    def finish(self) -> None:
        """Renames the complete file to its final path.

        Raises InvalidRequestError (MEDIA_MISMATCH) if the file is incomplete, or differs from its description.
        """
        if not self._is_complete:
            raise InvalidRequestError(f"the download of {self._stated.uri} ended early; retry", reason="MEDIA_MISMATCH")
        check_content(self._stated, size_bytes=self._size_bytes, sha256=self._digest.digest())
        self._file.close()
        with writing(self._path):
            os.replace(self._temporary, self._path)  # noqa: PTH105 - the same on all systems

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._temporary.unlink(missing_ok=True)


def stored_file(message: request_pb2.MediaFile) -> MediaFile:
    """Returns the client's description of a stored file."""
    return MediaFile(message.uri, message.media_type, size_bytes=message.size_bytes, sha256=message.sha256)
