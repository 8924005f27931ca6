"""A way to bring a tensor from one process to another: a sender, a receiver, and how a message's time is taken.

The clock starts before `send` gets a tensor in the sender's ordinary memory and stops when `receive` returns one. Both
ends read CLOCK_MONOTONIC, which is one clock on one host. A tick comes back for each message beside the way that is
measured, so that messages go one at a time, each at rest; what the clock said is collected afterwards.
"""

import asyncio
import functools
import time
from abc import abstractmethod
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from benchmarks.edge_ways.worker import End, readable

Bytes: TypeAlias = npt.NDArray[np.uint8]

WARM_UP = 1
"""Messages ahead of those that count, each time that a way has its turn."""
REST_S = 0.001
"""Between messages: acknowledgements and leases go back, as they do where an engine computes between its chunks."""


class Sender(End):
    """The end whose tensors are sent."""

    @abstractmethod
    async def send(self, tensor: Bytes) -> None:
        """Sends one tensor to every peer; what follows may go on afterwards."""

    async def time_sends(self, *, size_bytes: int, count: int) -> list[int]:
        """When each of `count` messages was given to `send`, in ns."""
        tensor = source(size_bytes)
        starts = [await self._time_one(tensor, number) for number in range(WARM_UP + count)]
        return starts[WARM_UP:]

    async def time_copies(self, *, size_bytes: int, count: int) -> list[float]:
        """The baseline memcpy: seconds of each copy of the same tensor into warm memory."""
        tensor, copied = source(size_bytes), target(size_bytes)
        times_s: list[float] = []
        for _ in range(WARM_UP + count):
            await asyncio.sleep(REST_S)
            start = time.monotonic_ns()
            np.copyto(copied, tensor)
            times_s.append((time.monotonic_ns() - start) / 1e9)
        return times_s[WARM_UP:]

    async def _time_one(self, tensor: Bytes, number: int) -> int:
        mark(tensor, number)
        await asyncio.sleep(REST_S)
        ticks = [readable(peer) for peer in self.peers]
        start = time.monotonic_ns()
        await self.send(tensor)
        await asyncio.gather(*ticks)
        for peer in self.peers:
            peer.recv_bytes()
        return start


class Receiver(End):
    """The end that a tensor comes to; has one peer."""

    @abstractmethod
    async def receive(self, size_bytes: int) -> Bytes:
        """The next tensor."""

    async def time_receives(self, *, size_bytes: int, count: int) -> list[int]:
        """When each of `count` messages was in hand, in ns."""
        ends = [await self._time_one(size_bytes, number) for number in range(WARM_UP + count)]
        return ends[WARM_UP:]

    async def _time_one(self, size_bytes: int, number: int) -> int:
        tensor = await self.receive(size_bytes)
        end = time.monotonic_ns()
        check_mark(tensor, number, size_bytes=size_bytes)
        self.peers[0].send_bytes(b"")
        return end


@functools.cache
def source(size_bytes: int) -> Bytes:
    """This process's tensor of that size, in ordinary memory."""
    return np.random.default_rng(size_bytes).integers(0, 256, size_bytes, np.uint8)


@functools.cache
def target(size_bytes: int) -> Bytes:
    """Ordinary memory of that size to receive into, touched."""
    return np.zeros(size_bytes, np.uint8)


def mark(tensor: Bytes, number: int) -> None:
    """Makes a message tell its number, at both of its ends."""
    tensor[:8] = tensor[-8:] = np.array([number], np.int64).view(np.uint8)


def check_mark(tensor: Bytes, number: int, *, size_bytes: int) -> None:
    """Raises ValueError unless the tensor is the one that was marked so: wrong bytes are no measure."""
    marks = [int(tensor[:8].view(np.int64)[0]), int(tensor[-8:].view(np.int64)[0])]
    if tensor.nbytes != size_bytes or marks != [number, number]:
        raise ValueError(f"message {number} of {size_bytes} bytes came as {marks} of {tensor.nbytes}")
