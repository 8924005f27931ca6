"""Stores for tests: folders, S3, and web servers that answer, never answer, or do not exist."""

import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import pytest
from moto.server import ThreadedMotoServer

from stagemesh.common.errors import StagemeshError
from stagemesh.common.media.store import MediaStore
from stagemesh.common.process.media_config import MediaConfig
from stagemesh.v1 import request_pb2


def make_store(folder: Path, *, writer: str = "test", **config: object) -> MediaStore:
    """Returns a store with the root `folder`/store. `config` sets fields of MediaConfig."""
    fields = {"store": str(folder / "store"), **config}
    return MediaStore(MediaConfig(**fields), writer=writer, spool=folder / "spool")  # type: ignore[arg-type]


def placed(folder: Path, name: str = "a.png", content: bytes = b"content") -> str:
    """Writes a file into the store with the root `folder`/store. Returns its URI."""
    path = folder / "store" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return f"file://{path}"


def files_in(folder: Path) -> list[Path]:
    """Returns all files below a folder."""
    return [path for path in folder.rglob("*") if path.is_file()]


def join_store_threads() -> None:
    """Waits until the threads of calls that were cancelled have ended."""
    for thread in threading.enumerate():
        if thread.name.startswith("media "):
            thread.join(5)


async def failure(store: MediaStore, uri: str, **fields: Any) -> str:
    """Returns the reason of the error with which a file cannot be fetched."""
    with pytest.raises(StagemeshError) as caught:
        (await store.fetch(request_pb2.MediaFile(uri=uri, **fields))).close()
    return caught.value.reason


class Answering(BaseHTTPRequestHandler):
    """Answers all requests, and prints nothing."""

    content = b"content"

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.content)))
        self.end_headers()

    def do_GET(self) -> None:
        self.do_HEAD()
        with suppress(ConnectionError):
            self.wfile.write(self.content)

    def log_message(self, *_: object) -> None:
        """Prints nothing."""


@contextmanager
def web_server(content: bytes | None) -> Iterator[str]:
    """Serves `content` at every path of a web server. If it is None, the server never answers. Yields its URL."""
    if content is None:
        # The system accepts the connections, and nothing reads them.
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        return
    with running_server(type("Handler", (Answering,), {"content": content})) as url:
        yield url


@contextmanager
def running_server(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Runs a web server in a thread. Yields its URL."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def redirecting_server(target: str, *, status: int, methods: Sequence[str]) -> Iterator[str]:
    """Redirects requests by these methods to `target`, and answers others with 7 bytes. Yields its URL."""

    class Handler(Answering):
        def do_HEAD(self) -> None:
            self.send_response(status if self.command in methods else 200)
            self.send_header("Location", target)
            self.send_header("Content-Length", "7")
            self.end_headers()

    with running_server(Handler) as url:
        yield url


class Bucket(NamedTuple):
    """A bucket of an S3 server."""

    name: str
    options: dict[str, dict[str, Any]]
    """The value of `storage_options` with which it can be reached."""
    client: Any
    """A client of the server, from boto3."""

    @property
    def url(self) -> str:
        return f"s3://{self.name}"

    def store(self, folder: Path) -> MediaStore:
        """Returns a store with the root `url`/store."""
        config = MediaConfig(store=f"{self.url}/store", storage_options=self.options, max_file_bytes=20_000_000)
        return MediaStore(config, writer="test", spool=folder / "spool")

    def contents(self) -> dict[str, bytes]:
        """Returns all visible objects, by key."""
        keys = [each["Key"] for each in self.client.list_objects_v2(Bucket=self.name).get("Contents", ())]
        return {key: self.client.get_object(Bucket=self.name, Key=key)["Body"].read() for key in keys}

    def unfinished(self) -> list[str]:
        """Returns the keys of the uploads that are neither completed nor aborted."""
        return [each["Key"] for each in self.client.list_multipart_uploads(Bucket=self.name).get("Uploads", ())]


@contextmanager
def s3_server() -> Iterator[Bucket]:
    """Serves an empty bucket by the S3 protocol."""
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        # One attempt, so that a server that has gone is noticed soon.
        once = {"retries": {"total_max_attempts": 1}}
        access = {"endpoint_url": url, "key": "test", "secret": "test", "config_kwargs": once}
        client = boto3.client(
            "s3",
            region_name="us-east-1",
            endpoint_url=url,
            aws_access_key_id="test",
            aws_secret_access_key="test",  # noqa: S106
        )
        # All servers in a process share their buckets.
        bucket = Bucket(f"media-{uuid.uuid4().hex}", {"s3": access}, client)
        client.create_bucket(Bucket=bucket.name)
        yield bucket
    finally:
        server.stop()
