"""The play-out of a function's audio: the order of waiting calls, and what calls cost."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import Generic, TypeVar

from stagemesh.common.plugins.descriptors import Signature
from stagemesh.connectors.packets import Packet

T = TypeVar("T")

EWMA_WEIGHT = 0.2
"""The weight of the newest measurement in a moving average."""
_FIRST_CALLS = 6
"""The number of calls for which the first audio of a request may wait for streams that would run dry meanwhile."""


class AudioTensor:
    """The audio tensor that a function emits: the first one with a sample rate, if the function's signature has one."""

    def __init__(self, signature: Signature) -> None:
        rates_hz = {name: each.sample_rate_hz for name, each in signature.emits.items() if each.kind == "audio"}
        self._name, self._rate_hz = next((each for each in rates_hz.items() if each[1]), ("", 0))

    @property
    def exists(self) -> bool:
        """Whether the function emits audio that can be played."""
        return bool(self._name)

    def seconds(self, packets: Sequence[Packet]) -> float:
        """Returns the duration of the audio in packets, in seconds."""
        samples = sum(len(packet.tensors.get(self._name, ())) for packet in packets)
        return samples / self._rate_hz if samples else 0.0


class AudioStream:
    """The play-out of the audio that one request has emitted.

    A listener plays audio as soon as it is emitted, and waits for more when the stream has run dry.
    """

    __slots__ = ("dry_s",)

    def __init__(self) -> None:
        self.dry_s = -inf
        """The time at which the stream runs dry, in seconds. Minus infinity if it has emitted no audio."""

    @property
    def has_begun(self) -> bool:
        """Whether the request has emitted audio."""
        return self.dry_s > -inf

    def add(self, audio_s: float, *, now_s: float) -> None:
        """Adds `audio_s` seconds of audio, emitted at the time `now_s`."""
        if audio_s:
            self.dry_s = max(self.dry_s, now_s) + audio_s


@dataclass
class _AudioOfFrames:
    """The total number of frames of some calls, and the duration of their audio in seconds."""

    calls: int = 0
    frames: int = 0
    audio_s: float = 0.0

    def add(self, frames: int, *, audio_s: float) -> None:
        self.calls, self.frames, self.audio_s = self.calls + 1, self.frames + frames, self.audio_s + audio_s


class CallCosts:
    """Measures how long calls take, and how much audio they make of a frame. All times are in seconds."""

    def __init__(self) -> None:
        self.by_frames: dict[int, float] = {}
        """The moving average of the duration of calls, by their number of frames rounded up to a power of 2.

        The first call of a shape takes up to twenty times as long as later ones, because libraries prepare their
        kernels. It counts only until another call of this size was measured.
        """
        self._shapes: set[tuple[int, int]] = set()
        """The shapes of all calls: the number of packets, and the maximum number of frames of a packet."""
        self._settled: set[int] = set()
        """The keys of `by_frames` whose calls had a known shape."""
        self._mean_s = 0.0
        self._all, self._first = _AudioOfFrames(), _AudioOfFrames()

    @property
    def frame_audio_s(self) -> float:
        """The mean duration of the audio of one frame. 0 if no call has been measured."""
        return self._all.audio_s / self._all.frames if self._all.frames else 0.0

    @property
    def audio_delay_s(self) -> float:
        """The mean duration of the audio that a function retains of a request's frames until the next frames arrive.

        A decoder whose output depends on later frames retains some audio. The first call of a request makes less audio
        than its frames last, and the last call makes more.
        """
        calls = self._first.calls
        return max(0.0, self._first.frames * self.frame_audio_s - self._first.audio_s) / calls if calls else 0.0

    def add(self, frames: Sequence[int], *, took_s: float, audio_s: float) -> None:
        """Adds a call whose packets had these numbers of frames, and became `audio_s` seconds of audio together."""
        # Frames that do not become audio, such as those of a reference voice, do not change the mean.
        if audio_s:
            self._all.add(sum(frames), audio_s=audio_s)
        if most := max(frames):
            self._add_duration(took_s, shape=(len(frames), most), size=1 << (most - 1).bit_length())

    def add_first(self, frames: int, *, audio_s: float) -> None:
        """Adds the first call of a request that made audio: `audio_s` seconds of this number of frames."""
        self._first.add(frames, audio_s=audio_s)

    def _add_duration(self, took_s: float, *, shape: tuple[int, int], size: int) -> None:
        is_known = shape in self._shapes
        self._shapes.add(shape)
        if size in self._settled and not is_known:
            return
        if is_known and size not in self._settled:
            self._settled.add(size)
            self.by_frames[size] = took_s
        former_s = self.by_frames.get(size, took_s)
        self.by_frames[size] = former_s + EWMA_WEIGHT * (took_s - former_s)
        self._mean_s += (took_s - self._mean_s) * (EWMA_WEIGHT if self._mean_s else 1.0)

    def due_s(self, stream: AudioStream, *, now_s: float) -> float:
        """Returns the time at which a call for a stream is due: when the stream runs dry, or soon if it has not begun.

        First audio is preceded only by streams that would otherwise run dry. If it preceded those, too, then a few
        requests more in a second would interrupt most of the streams.
        """
        return stream.dry_s if stream.has_begun else now_s + _FIRST_CALLS * self._mean_s


class CallQueue(Generic[T]):
    """A queue of calls. The call that is due first leaves first, in one batch with the next ones of its shape."""

    def __init__(self) -> None:
        self._heaps: dict[Hashable, list[tuple[float, int, T]]] = {}
        self._arrivals = count()
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def add(self, call: T, *, shape: Hashable, due_s: float) -> None:
        """Adds a call that is due at the time `due_s`. It may share a batch with other calls of an equal `shape`.

        Calls that are due at the same time leave in the order of their arrival.
        """
        heappush(self._heaps.setdefault(shape, []), (due_s, next(self._arrivals), call))
        self._length += 1

    def pop_batch(self, max_calls: int) -> list[T]:
        """Removes the call that is due first and the next ones of its shape, at most `max_calls`, in this order.

        Raises ValueError if the queue is empty.
        """
        shape, heap = min(self._heaps.items(), key=lambda each: each[1][0][:2])
        batch = [heappop(heap)[-1] for _ in range(min(max_calls, len(heap)))]
        if not heap:
            del self._heaps[shape]
        self._length -= len(batch)
        return batch
