"""Stores for tests: folders, and web servers that answer, never answer, or do not exist."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from stagemesh.common.media_config import MediaConfig
from stagemesh.services.media.store import MediaStore


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


@contextmanager
def web_server(content: bytes | None) -> Iterator[str]:
    """Serves `content` at every path of a web server. If it is None, the server never answers. Yields its URL."""
    if content is None:
        # The system accepts the connections, and nothing reads them.
        with socket.create_server(("127.0.0.1", 0), backlog=128) as listening:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        return
    body = content

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()

        def do_GET(self) -> None:
            self.do_HEAD()
            with suppress(ConnectionError):
                self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Prints nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
