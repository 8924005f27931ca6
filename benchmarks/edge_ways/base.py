"""Ways to send a tensor from one process to another: a sender, a receiver, and the measurement of a message's time.

The time starts before `send` is called with a tensor in the sender's ordinary memory and ends when `receive` returns a
tensor. Both ends read CLOCK_MONOTONIC, which is one clock on one host. The receiver confirms each message over a pipe
that is not measured, so that messages are sent one at a time. The times are collected afterwards.
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
"""The number of messages at the start of a turn that do not count."""
REST_S = 0.001
"""The pause between messages. Acknowledgements and leases return meanwhile, as while an engine computes."""


class Sender(End):
    """The end that sends tensors."""

    @abstractmethod
    async def send(self, tensor: Bytes) -> None:
        """Sends one tensor to every peer. It may return before the tensor has arrived."""

    async def time_sends(self, *, size_bytes: int, count: int) -> list[int]:
        """Sends `count` messages and returns the start time of each, in ns."""
        tensor = source(size_bytes)
        starts = [await self._time_one(tensor, number) for number in range(WARM_UP + count)]
        return starts[WARM_UP:]

    async def time_copies(self, *, size_bytes: int, count: int) -> list[float]:
        """Returns the seconds of each copy of a tensor into warm memory: the baseline memcpy."""
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
    """The end that receives tensors from its only peer."""

    @abstractmethod
    async def receive(self, size_bytes: int) -> Bytes:
        """Returns the next tensor."""

    async def time_receives(self, *, size_bytes: int, count: int) -> list[int]:
        """Receives `count` messages and returns the time of each, in ns."""
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
    """Returns this process's tensor of a size, in ordinary memory."""
    return np.random.default_rng(size_bytes).integers(0, 256, size_bytes, np.uint8)


@functools.cache
def target(size_bytes: int) -> Bytes:
    """Returns ordinary memory of a size to receive into, already touched."""
    return np.zeros(size_bytes, np.uint8)


def mark(tensor: Bytes, number: int) -> None:
    """Writes a message's number into both of its ends."""
    tensor[:8] = tensor[-8:] = np.array([number], np.int64).view(np.uint8)


def check_mark(tensor: Bytes, number: int, *, size_bytes: int) -> None:
    """Raises ValueError unless both ends of the tensor contain the number: a wrong tensor must not be measured."""
    marks = [int(tensor[:8].view(np.int64)[0]), int(tensor[-8:].view(np.int64)[0])]
    if tensor.nbytes != size_bytes or marks != [number, number]:
        raise ValueError(f"message {number} of {size_bytes} bytes came as {marks} of {tensor.nbytes}")
