"""A relay to a service, whose connections a test can break."""

import asyncio
import itertools
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress


class BreakableRelay:
    """Relays data between clients and services in both directions, in its own thread. Clients can connect again after a
    cut.
    """

    def __init__(self, *targets: str) -> None:
        self.targets = list(targets)
        """The addresses of the services. The connections use them in turn. A test may change the list."""
        self._connections = itertools.count()
        self._ends: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._serving = threading.Event()
        self.endpoint = ""
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)

    def open(self) -> None:
        """Starts the relay and returns once it listens."""
        self._thread.start()
        assert self._serving.wait(10)

    def cut(self) -> None:
        """Aborts every connection."""
        self._loop.call_soon_threadsafe(self._abort)

    def close(self) -> None:
        """Aborts every connection and accepts no more."""
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(10)
        self._loop.close()

    async def _serve(self) -> None:
        async with await asyncio.start_server(self._relay, "127.0.0.1", 0) as server:
            self.endpoint = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            self._serving.set()
            await self._stopping.wait()
            # asyncio leaves a socket open if the server closes between the accept and the creation of its transport.
            for listening in server.sockets:
                self._loop.remove_reader(listening.fileno())
            for _ in range(10):
                await asyncio.sleep(0)
            self._abort()
        # The aborted connections end by themselves.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.wait(others)

    async def _relay(self, near: asyncio.StreamReader, near_end: asyncio.StreamWriter) -> None:
        self._ends.add(near_end)
        with suppress(OSError):
            host, _, port = self.targets[next(self._connections) % len(self.targets)].rpartition(":")
            far, far_end = await asyncio.open_connection(host, int(port))
            self._ends.add(far_end)
            await asyncio.gather(_pass(near, far_end), _pass(far, near_end))
        near_end.close()

    def _abort(self) -> None:
        while self._ends:
            self._ends.pop().transport.abort()


@contextmanager
def breakable_relay(*targets: str) -> Generator[BreakableRelay]:
    """Runs a relay to `targets` within the block."""
    made = BreakableRelay(*targets)
    made.open()
    try:
        yield made
    finally:
        made.close()


async def _pass(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await source.read(1 << 16):
            sink.write(data)
            await sink.drain()
    sink.close()
