import asyncio
import hashlib
import os
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest

from stagemesh.client import AsyncClient, Client
from stagemesh.common.errors import StagemeshError
from stagemesh.common.media import stored_file
from stagemesh.common.media.store import MediaStore
from stagemesh.conformance.replicas import until
from stagemesh.orchestrator import service as orchestrator
from stagemesh.orchestrator.config import OrchestratorConfig, ReplicaAddress
from stagemesh.pipeline import load_pipeline
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.rpc.server import Server
from stagemesh.services.media.service import MediaServicer
from stagemesh.v1 import media_pb2, media_pb2_grpc, request_pb2
from tests.limits import files_of_at_most
from tests.media.locations import files_in, make_store, placed, web_server
from tests.rpc.call_errors import error_of
from tests.system.pipelines import pipeline_file

CONTENT = os.urandom(2_500_000)


@asynccontextmanager
async def serving(store: MediaStore) -> AsyncGenerator[str]:
    server = Server("127.0.0.1:0")
    media_pb2_grpc.add_MediaServiceServicer_to_server(MediaServicer(store), server.grpc)
    yield f"127.0.0.1:{await server.start()}"
    await server.stop(grace_s=0)


@asynccontextmanager
async def served(store: MediaStore) -> AsyncGenerator["media_pb2_grpc.MediaServiceAsyncStub"]:
    async with serving(store) as endpoint, open_channel(endpoint) as channel:
        yield media_pb2_grpc.MediaServiceStub(channel)


def messages(
    content: bytes = CONTENT, *, part_bytes: int = 1 << 20, **first: Any
) -> list[media_pb2.UploadMediaRequest]:
    """Returns the messages that upload `content`. `first` sets fields of the first message."""
    parts = [
        request_pb2.Media(data=content[at : at + part_bytes], offset=at, last=at + part_bytes >= len(content))
        for at in range(0, max(1, len(content)), part_bytes)
    ]
    parts[0].media_type = "video/mp4"
    return [media_pb2.UploadMediaRequest(media=each, **(first if each is parts[0] else {})) for each in parts]


def upload_error(endpoint: str, sent: list[media_pb2.UploadMediaRequest], *, timeout_s: float = 20) -> StagemeshError:
    """Returns the error with which an upload ends."""
    with grpc.insecure_channel(endpoint) as channel, pytest.raises(grpc.RpcError) as caught:
        media_pb2_grpc.MediaServiceStub(channel).UploadMedia(iter(sent), timeout=timeout_s)
    return from_rpc_error(caught.value, peer="media")


async def failure(store: MediaStore, sent: list[media_pb2.UploadMediaRequest]) -> StagemeshError:
    async with serving(store) as endpoint:
        return await asyncio.to_thread(upload_error, endpoint, sent)


async def downloaded(endpoint: str, uri: str) -> bytes:
    request = media_pb2.DownloadMediaRequest(uri=uri)
    async with open_channel(endpoint) as channel:
        parts = media_pb2_grpc.MediaServiceStub(channel).DownloadMedia(request, timeout=20)
        return b"".join([part.media.data async for part in parts])


async def test_an_uploaded_file_is_downloaded_unchanged(tmp_path: Path) -> None:
    async with served(make_store(tmp_path)) as stub:
        digest = hashlib.sha256(CONTENT).digest()
        file = (await stub.UploadMedia(iter(messages(size_bytes=len(CONTENT), sha256=digest)))).file
        assert (file.media_type, file.size_bytes, file.sha256) == ("video/mp4", len(CONTENT), digest)
        assert file.uri.startswith(f"file://{tmp_path}/store/uploads/")
        assert file.uri.endswith(".mp4")
        parts = [each.media async for each in stub.DownloadMedia(media_pb2.DownloadMediaRequest(uri=file.uri))]
    assert b"".join(part.data for part in parts) == CONTENT
    assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]


@pytest.mark.parametrize(
    ("sent", "reason"),
    [
        (messages()[:-1], "INVALID_MEDIA"),
        (messages()[1:], "INVALID_MEDIA"),
        ([messages()[0], messages()[0]], "INVALID_MEDIA"),
        ([*messages(b"x"), *messages(b"x")], "INVALID_MEDIA"),
        (messages(part_bytes=(1 << 20) + 1), "INVALID_MEDIA"),
        (messages(b""), "INVALID_MEDIA"),
        ([], "INVALID_MEDIA"),
        (messages(size_bytes=len(CONTENT) + 1), "MEDIA_MISMATCH"),
        (messages(sha256=b"x" * 32), "MEDIA_MISMATCH"),
        (messages(b"x", size_bytes=4_000_001), "FILE_TOO_LARGE"),
        (messages(bytes(4_000_001)), "FILE_TOO_LARGE"),
    ],
)
async def test_an_invalid_upload_is_rejected_and_leaves_nothing(
    tmp_path: Path, sent: list[media_pb2.UploadMediaRequest], reason: str
) -> None:
    assert (await failure(make_store(tmp_path, max_file_bytes=4_000_000), sent)).reason == reason
    assert files_in(tmp_path) == []


async def test_an_upload_that_is_cut_off_leaves_nothing(tmp_path: Path) -> None:
    async with served(make_store(tmp_path)) as stub:
        call = stub.UploadMedia()
        await call.write(messages()[0])
        await until(lambda: bool(files_in(tmp_path)), timeout_s=5)
        call.cancel()
        await until(lambda: not files_in(tmp_path), timeout_s=5)


async def test_a_full_store_is_reported_and_nothing_remains(tmp_path: Path) -> None:
    with files_of_at_most(2_000_000):
        error = await failure(make_store(tmp_path), messages())
    assert error.reason == "STORAGE_FULL"
    assert files_in(tmp_path) == []


async def test_a_read_only_store_rejects_uploads_and_serves_downloads(tmp_path: Path) -> None:
    uri = placed(tmp_path)
    # Not even root can create a folder here.
    store = make_store(tmp_path, store="/sys/stagemesh", allowed=(str(tmp_path / "store"),))
    async with serving(store) as endpoint:
        uploading = asyncio.create_task(asyncio.to_thread(upload_error, endpoint, messages()))
        assert await downloaded(endpoint, uri) == b"content"
        assert (await uploading).reason == "STORE_DENIED"
    assert files_in(tmp_path) == [tmp_path / "store" / "a.png"]


async def test_a_remote_store_that_never_answers_is_reported_and_delays_no_download(tmp_path: Path) -> None:
    uri = placed(tmp_path)
    with web_server(None) as url:
        timeouts = {"read_timeout": 0.1, "retries": {"total_max_attempts": 1}}
        access = {"endpoint_url": url, "key": "test", "secret": "test", "config_kwargs": timeouts}
        allowed = (str(tmp_path / "store"),)
        store = make_store(tmp_path, store="s3://bucket", allowed=allowed, storage_options={"s3": access})
        async with serving(store) as endpoint:
            uploading = asyncio.create_task(asyncio.to_thread(upload_error, endpoint, messages()))
            assert await downloaded(endpoint, uri) == b"content"
            assert not uploading.done()
            assert (await uploading).reason == "STORE_UNREACHABLE"
    assert files_in(tmp_path) == [tmp_path / "store" / "a.png"]


async def test_an_upload_to_a_silent_store_ends_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writing, may_write, write = threading.Event(), threading.Event(), stored_file.LocalTarget.write

    def write_slowly(self: stored_file.LocalTarget, data: bytes | memoryview) -> None:
        if data == b"slow":
            writing.set()
            may_write.wait(20)
        write(self, data)

    monkeypatch.setattr(stored_file.LocalTarget, "write", write_slowly)
    async with serving(make_store(tmp_path)) as endpoint, open_channel(endpoint) as channel:
        slow = asyncio.create_task(asyncio.to_thread(upload_error, endpoint, messages(b"slow"), timeout_s=1))
        await asyncio.to_thread(writing.wait, 10)
        uploaded = await media_pb2_grpc.MediaServiceStub(channel).UploadMedia(iter(messages()), timeout=20)
        assert await downloaded(endpoint, uploaded.file.uri) == CONTENT
        assert not slow.done()
        assert (await slow).reason == "DEADLINE_EXCEEDED"
        may_write.set()
        await until(lambda: len(files_in(tmp_path)) == 1, timeout_s=5)
    assert [path.read_bytes() for path in files_in(tmp_path)] == [CONTENT]


@pytest.mark.parametrize(
    ("uri", "reason"),
    [("file:///etc/passwd", "REFERENCE_NOT_ALLOWED"), ("file://{folder}/store/none", "UNKNOWN_MEDIA")],
)
async def test_only_files_in_allowed_locations_are_downloaded(tmp_path: Path, uri: str, reason: str) -> None:
    async with served(make_store(tmp_path)) as stub:
        call = stub.DownloadMedia(media_pb2.DownloadMediaRequest(uri=uri.format(folder=tmp_path)))
        assert (await error_of(call, peer="media")).reason == reason


async def test_an_empty_file_is_downloaded_as_one_empty_part(tmp_path: Path) -> None:
    async with served(make_store(tmp_path)) as stub:
        uri = placed(tmp_path, content=b"")
        parts = [each.media async for each in stub.DownloadMedia(media_pb2.DownloadMediaRequest(uri=uri))]
    assert parts == [request_pb2.Media(last=True)]


@pytest.mark.parametrize("offset", [0, 1, len(CONTENT) - 1, len(CONTENT), len(CONTENT) + 1, (1 << 64) - 1])
async def test_a_download_begins_at_the_offset(tmp_path: Path, offset: int) -> None:
    async with served(make_store(tmp_path)) as stub:
        request = media_pb2.DownloadMediaRequest(uri=placed(tmp_path, content=CONTENT), offset=offset)
        parts = [each.media async for each in stub.DownloadMedia(request)]
    assert b"".join(part.data for part in parts) == CONTENT[offset:]
    assert parts[0].offset == offset
    assert parts[-1].last


@pytest.mark.parametrize("server_name", ["media.example", ""])
async def test_clients_connect_with_the_name_in_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, server_name: str
) -> None:
    text = "pipeline: eye\nstages: {eye: {engine: fake, function: look}}\noutputs: {text: eye}"
    (tmp_path / "a.mp4").write_bytes(CONTENT)
    names = list[tuple[str, object]]()

    def noted(open_insecure: Callable[..., Any]) -> Callable[..., Any]:
        def insecure_channel(endpoint: str, *, options: Sequence[tuple[str, object]]) -> Any:
            names.append((endpoint, dict(options).get("grpc.ssl_target_name_override", "")))
            return open_insecure(endpoint, options=options)

        return insecure_channel

    for module in (grpc, grpc.aio):
        monkeypatch.setattr(module, "insecure_channel", noted(module.insecure_channel))
    async with serving(make_store(tmp_path)) as media_endpoint:
        config = OrchestratorConfig(
            str(pipeline_file(tmp_path, text)),
            {"eye": (ReplicaAddress("eye-0", "127.0.0.1:1"),)},
            "127.0.0.1:0",
            drain_s=0,
            media_endpoint=media_endpoint,
            media_server_name=server_name,
        )
        async with orchestrator.serving(config, load_pipeline(config.pipeline)) as port:
            endpoint = f"127.0.0.1:{port}"
            await asyncio.to_thread(_transfer, endpoint, tmp_path)
            async with AsyncClient(endpoint) as client:
                file = await client.upload(tmp_path / "a.mp4")
                await client.download(file, tmp_path / "b.mp4")
    assert [name for opened, name in names if opened == media_endpoint] == [server_name] * 4


def _transfer(endpoint: str, folder: Path) -> None:
    with Client(endpoint) as client:
        client.download(client.upload(folder / "a.mp4"), folder / "b.mp4")
