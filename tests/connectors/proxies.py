"""A TCP relay whose connections a test can cut."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """Relays to one address; `cut` resets everything that runs through it, new connections go on."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self.cuts = 0
        self.forwarded_bytes = 0
        self.cut_at_bytes: list[int] = []
        """Totals of forwarded bytes at which to cut, ascending."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._writers |= {writer, upstream_writer}
        with suppress(OSError):
            await asyncio.gather(self._pump(reader, upstream_writer), self._pump(upstream_reader, writer))
        for one in (writer, upstream_writer):
            self._writers.discard(one)
            one.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(16 << 10):
            self.forwarded_bytes += len(data)
            if self.cut_at_bytes and self.forwarded_bytes >= self.cut_at_bytes[0]:
                self.cut_at_bytes.pop(0)
                self.cut()
                return
            writer.write(data)
            await writer.drain()
        writer.close()

    def cut(self) -> None:
        """Resets all connections."""
        self.cuts += 1
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def proxied(endpoint: str) -> AsyncIterator[tuple[Proxy, str]]:
    """A proxy before "host:port", and its own endpoint."""
    proxy = Proxy(int(endpoint.rsplit(":", 1)[1]))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield proxy, f"127.0.0.1:{port}"
        proxy.cut()
