"""Stores for tests: folders, and web servers that answer, never answer, or do not exist."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
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


@asynccontextmanager
async def web_server(content: bytes | None) -> AsyncGenerator[str]:
    """Serves `content` at every path of a web server. If it is None, the server never answers. Yields its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        request = await reader.readuntil(b"\r\n\r\n")
        if content is None:
            await reader.read()
        else:
            body = b"" if request.startswith(b"HEAD") else content
            writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(content) + body)
            await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
