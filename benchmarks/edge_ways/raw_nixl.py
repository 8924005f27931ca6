"""Raw NIXL: memory is registered once, transfers are prepared once for each size, and the reader polls without a pause.

`RawNixl*` perform the steps of an edge: copy into registered memory, notify, READ. They skip the check that the memory
was not reused during the READ. `time_reads` measures the READ alone. The kernel backs private memory with huge pages,
which makes it up to 1.5 times as fast as a memory file. A shared arena must be a memory file, so that others on the
host can map it: `RawNixlFile*` use one.
"""

import asyncio
import mmap
import os
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.edge_ways.base import WARM_UP, Bytes, Receiver, Sender
from benchmarks.edge_ways.worker import receive

if TYPE_CHECKING:
    from nixl_cu12._api import nixl_agent, nixl_xfer_handle

MAX_BYTES = 64 << 20
SPIN_S = 10.0
POLL_S = 0.02


class RawNixlSender(Sender):
    """Owns the memory that is read."""

    def make_memory(self) -> Bytes:
        """Creates touched memory to read from."""
        return np.ones(MAX_BYTES, np.uint8)

    async def open(self) -> None:
        self._agent, self._memory = _registered("sender", self.make_memory())
        self.peers[0].send((self._agent.get_agent_metadata(), self._memory.ctypes.data))
        self._receiver = self._agent.add_remote_agent(await receive(self.peers[0]))
        self._agent.send_notif(self._receiver, b"hello")
        # The agents connect only while both of them poll, with the first message and the first READ.
        await self.serve()

    async def close(self) -> None:
        """Does nothing: the agent ends with the process."""

    async def send(self, tensor: Bytes) -> None:
        np.copyto(self._memory[: tensor.nbytes], tensor)
        self._agent.send_notif(self._receiver, str(tensor.nbytes).encode())

    async def time_sends(self, *, size_bytes: int, count: int) -> list[int]:
        async with self._polling():
            return await super().time_sends(size_bytes=size_bytes, count=count)

    async def serve(self) -> None:
        """Serves the receiver's reads until it reports that it is done."""
        async with self._polling():
            await receive(self.peers[0])

    @asynccontextmanager
    async def _polling(self) -> AsyncGenerator[None]:
        """Polls the agent within the block: one READ in hundreds needs the memory's owner to poll, and would hang.

        More frequent polls would take the core from the reader.
        """

        async def poll() -> None:
            while True:
                self._agent.get_new_notifs()
                await asyncio.sleep(POLL_S)

        task = asyncio.create_task(poll())
        try:
            yield
        finally:
            task.cancel()


class RawNixlReceiver(Receiver):
    """Reads the sender's memory."""

    def make_memory(self) -> Bytes:
        """Creates touched memory to read into."""
        return np.ones(MAX_BYTES, np.uint8)

    async def open(self) -> None:
        self._agent, self._memory = _registered("receiver", self.make_memory())
        metadata, self._address = await receive(self.peers[0])
        self.peers[0].send(self._agent.get_agent_metadata())
        self._sender = self._agent.add_remote_agent(metadata)
        self._transfers: dict[int, nixl_xfer_handle] = {}
        await self.receive(MAX_BYTES)
        self.peers[0].send("through")

    async def close(self) -> None:
        """Does nothing: the agent ends with the process."""

    async def receive(self, size_bytes: int) -> Bytes:
        transfer = self._prepared(size_bytes)
        _spin(self._agent.get_new_notifs)
        return self._read(transfer, size_bytes)

    async def time_reads(self, *, size_bytes: int, count: int) -> list[float]:
        """Returns the seconds of each READ alone, of memory that is already written."""
        transfer = self._prepared(size_bytes)
        times_s: list[float] = []
        for _ in range(WARM_UP + count):
            start = time.monotonic_ns()
            self._read(transfer, size_bytes)
            times_s.append((time.monotonic_ns() - start) / 1e9)
        self.peers[0].send("through")
        return times_s[WARM_UP:]

    def _read(self, transfer: "nixl_xfer_handle", size_bytes: int) -> Bytes:
        if self._agent.transfer(transfer) != "DONE":
            _spin(lambda: self._agent.check_xfer_state(transfer) == "DONE")
        return self._memory[:size_bytes]

    def _prepared(self, size_bytes: int) -> "nixl_xfer_handle":
        if size_bytes not in self._transfers:
            mine = self._agent.prep_xfer_dlist("", [(self._memory.ctypes.data, size_bytes, 0)], "DRAM")
            theirs = self._agent.prep_xfer_dlist(self._sender, [(self._address, size_bytes, 0)], "DRAM")
            self._transfers[size_bytes] = self._agent.make_prepped_xfer("READ", mine, [0], theirs, [0])
        return self._transfers[size_bytes]


class RawNixlFileSender(RawNixlSender):
    """Owns a memory file that is read, like a producer's arena."""

    def make_memory(self) -> Bytes:
        return _memory_file()


class RawNixlFileReceiver(RawNixlReceiver):
    """Reads into a memory file."""

    def make_memory(self) -> Bytes:
        return _memory_file()


def _memory_file() -> Bytes:
    """Returns touched memory that other processes could map."""
    fd = os.memfd_create("raw-nixl")
    os.ftruncate(fd, MAX_BYTES)
    memory = np.frombuffer(mmap.mmap(fd, MAX_BYTES, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE), np.uint8)
    os.close(fd)
    memory[:] = 1
    return memory


def _registered(name: str, memory: Bytes) -> "tuple[nixl_agent, Bytes]":
    """Returns an agent without a progress thread that has registered `memory`, and the memory."""
    from nixl_cu12._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
    agent.register_memory([(memory.ctypes.data, memory.nbytes, 0, "")], "DRAM")
    return agent, memory


def _spin(done: Callable[[], object]) -> None:
    give_up_at = time.monotonic() + SPIN_S
    while not done():
        if time.monotonic() > give_up_at:
            raise TimeoutError(f"NIXL did nothing for {SPIN_S:.0f} s")
