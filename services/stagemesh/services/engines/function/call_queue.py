"""The order of a function's waiting calls: by play-out deadline, in batches of equal shapes."""

from collections.abc import Hashable, Sequence
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, TypeVar

from stagemesh.common.descriptors import Signature
from stagemesh.connectors.edge import Packet

T = TypeVar("T")


class AudioStream:
    """The play-out of the audio that one request has emitted.

    A listener plays samples as soon as they are emitted, and waits for the next ones when the stream has run dry.
    """

    __slots__ = ("_rate_hz", "_tensor", "dry_s")

    def __init__(self, signature: Signature) -> None:
        """Creates a stream of the first audio tensor with a sample rate that the signature emits, if it has one."""
        rates_hz = {name: each.sample_rate_hz for name, each in signature.emits.items() if each.kind == "audio"}
        self._tensor, self._rate_hz = next((each for each in rates_hz.items() if each[1]), ("", 0))
        self.dry_s = -inf
        """The time at which the stream runs dry, in seconds. Minus infinity if it has emitted no audio."""

    @property
    def is_played(self) -> bool:
        """Whether the stage emits audio that can be played."""
        return bool(self._tensor)

    def add(self, packets: Sequence[Packet], *, now_s: float) -> None:
        """Adds the samples of packets that are emitted at the time `now_s`."""
        samples = sum(len(packet.tensors.get(self._tensor, ())) for packet in packets)
        if samples:
            self.dry_s = max(self.dry_s, now_s) + samples / self._rate_hz


class CallQueue(Generic[T]):
    """A queue of calls. The most urgent call leaves first, in one batch with the next urgent ones of its shape."""

    def __init__(self) -> None:
        self._heaps: dict[Hashable, list[tuple[float, int, T]]] = {}
        self._arrivals = count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, call: T, *, shape: Hashable = None, dry_s: float = -inf) -> None:
        """Adds a call, which may share a batch with other calls of an equal `shape`.

        The earlier `dry_s`, the more urgent is the call. Equally urgent calls leave in the order of their arrival.
        """
        heappush(self._heaps.setdefault(shape, []), (dry_s, next(self._arrivals), call))
        self._length += 1

    def pop_batch(self, max_calls: int) -> list[T]:
        """Removes the most urgent call and the next ones of its shape, at most `max_calls`, the most urgent first.

        Raises ValueError if the queue is empty.
        """
        shape, heap = min(self._heaps.items(), key=lambda each: each[1][0][:2])
        batch = [heappop(heap)[-1] for _ in range(min(max_calls, len(heap)))]
        if not heap:
            del self._heaps[shape]
        self._length -= len(batch)
        return batch
