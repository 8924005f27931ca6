"""A TCP proxy whose connections a test can cut."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress


class Proxy:
    """A TCP proxy for one port. `cut` resets the open connections. Later connections are still accepted."""

    def __init__(self, target_port: int) -> None:
        self.target_port = target_port
        self._writers: set[asyncio.StreamWriter] = set()
        self._running = 0
        self.cuts = 0
        self.forwarded_bytes = 0
        self.cut_at_bytes: list[int] = []
        """The numbers of forwarded bytes at which the proxy cuts all connections, in ascending order."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relays one connection until it ends."""
        self._running += 1
        try:
            async with _closing(writer):
                with suppress(OSError):
                    await self._relay(reader, writer)
        finally:
            self._running -= 1

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self.target_port)
        async with _closing(upstream_writer):
            ends = {writer, upstream_writer}
            self._writers |= ends
            pumps = self._pump(reader, upstream_writer), self._pump(upstream_reader, writer)
            await asyncio.gather(*pumps, return_exceptions=True)
            self._writers -= ends

    async def close(self) -> None:
        """Cuts all connections and waits until they have ended."""
        # A newly accepted connection starts within a few iterations of the event loop.
        for _ in range(10):
            await asyncio.sleep(0)
        self.cut()
        while self._running:  # noqa: ASYNC110 - a few iterations of the event loop suffice
            await asyncio.sleep(0)

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
        """Resets all open connections."""
        self.cuts += 1
        for writer in self._writers:
            writer.transport.abort()


@asynccontextmanager
async def _closing(writer: asyncio.StreamWriter) -> AsyncGenerator[None]:
    try:
        yield
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


@asynccontextmanager
async def proxied(endpoint: str) -> AsyncGenerator[tuple[Proxy, str]]:
    """Starts a proxy for the given "host:port" endpoint. Yields the proxy and the proxy's own endpoint."""
    proxy = Proxy(int(endpoint.rsplit(":", 1)[1]))
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        yield proxy, f"127.0.0.1:{port}"
        # Stops accepting first, because asyncio would leave a connection open that has no transport when the server
        # closes.
        for listening in server.sockets:
            asyncio.get_running_loop().remove_reader(listening.fileno())
        await proxy.close()
