"""What a client received of one request, when, and what is wrong with it."""

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise

from stagemesh.client import Event
from stagemesh.client.events import Admitted, AudioChunk, Finished, TensorOutput, Text
from tests.soak.workload import Request

_BEGINNING_BYTES = 16
_ON_ITS_WAY_S = 1.0


@dataclass(frozen=True)
class Flaws:
    """How many units are wrong, and how."""

    duplicated: int = 0
    lost: int = 0
    reordered: int = 0
    altered: int = 0
    """Stretches that are of no unit."""

    def __add__(self, other: "Flaws") -> "Flaws":
        return Flaws(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __bool__(self) -> bool:
        return self != Flaws()


def flaws(received: bytes, units: Sequence[bytes]) -> Flaws:
    """Compares what arrived of an output, however it was cut, with what it must bring."""
    if received == b"".join(units):
        return Flaws()
    found, altered = _units_in(received, units)
    counts = Counter(found)
    first_of_each = list(dict.fromkeys(found))
    return Flaws(
        duplicated=sum(count - 1 for count in counts.values()),
        lost=sum(number not in counts for number in range(len(units))),
        reordered=sum(later < earlier for earlier, later in pairwise(first_of_each)),
        altered=altered,
    )


def _units_in(received: bytes, units: Sequence[bytes]) -> tuple[list[int], int]:
    """The numbers of the units that stand there, and how often something else does."""
    number_of = {unit: number for number, unit in enumerate(units)}
    sizes = sorted({len(unit) for unit in units}, reverse=True)
    # Far fewer places begin like a unit than have to be looked at where something was altered.
    beginnings = {unit[:_BEGINNING_BYTES] for unit in units}
    found, altered, at, in_altered = list[int](), 0, 0, False
    while at < len(received):
        number = None
        if received[at : at + _BEGINNING_BYTES] in beginnings:
            pieces = (received[at : at + size] for size in sizes)
            number = next((number_of[piece] for piece in pieces if piece in number_of), None)
        if number is None:
            altered, in_altered = altered + (not in_altered), True
            at += 1
        else:
            found.append(number)
            in_altered = False
            at += len(units[number])
    return found, altered


@dataclass
class Arrivals:
    """The pieces of one output."""

    pieces: list[bytes] = field(default_factory=list[bytes])
    times_s: list[float] = field(default_factory=list[float])

    def add(self, piece: bytes) -> None:
        """One more has come."""
        self.pieces.append(piece)
        self.times_s.append(time.monotonic())

    def resumed_s(self, struck_s: float) -> float | None:
        """How long until they came again after what happened then; None where nothing came any more.

        That is where the longest pause ends of those that began before it or soon after: some may have been on its way.
        """
        pauses = [each for each in pairwise(self.times_s) if each[1] > struck_s and each[0] < struck_s + _ON_ITS_WAY_S]
        return max(pauses, key=lambda pause: pause[1] - pause[0])[1] - struck_s if pauses else None


class Delivery:
    """One request's events, as they come."""

    def __init__(self, request: Request, units: Mapping[str, Sequence[bytes]]) -> None:
        """`units` are what each output must bring."""
        self.request = request
        self.outputs = {output: Arrivals() for output in units}
        self.begun_s = time.monotonic()
        self.ended_s = self.begun_s
        self.error = ""
        self._units = units
        self._admitted = self._finished = self._disorder = 0

    def add(self, event: Event) -> None:
        """The next event."""
        self._disorder += self._finished > 0
        match event:
            case Admitted():
                self._admitted += 1
            case Text():
                self.outputs[event.output].add(event.delta.encode())
            case TensorOutput():
                self.outputs[event.output].add(event.tensor.tobytes())
            case AudioChunk():
                self.outputs[event.output].add(event.samples.tobytes())
            case Finished():
                self._finished += 1
            case _:
                pass

    def received(self, output: str) -> bytes:
        """All that arrived of an output."""
        return b"".join(self.outputs[output].pieces)

    def flaws(self) -> Flaws:
        """What is wrong with what arrived: of a request that failed, as far as it came."""
        found = Flaws(altered=self._disorder)
        for output in self.outputs:
            received = self.received(output)
            expected = self._units[output] if not self.error else self._begun(output, len(received))
            found += flaws(received, expected)
        return found

    def whole(self) -> bool:
        """Whether the client was told that it is all there."""
        return not self.error and self._finished == 1 and self._admitted >= 1

    def _begun(self, output: str, size_bytes: int) -> list[bytes]:
        """The units that so many bytes have come to, the last one cut."""
        ends = list(accumulate(len(unit) for unit in self._units[output]))
        whole = bisect_right(ends, size_bytes)
        rest = size_bytes - (ends[whole - 1] if whole else 0)
        units = list(self._units[output])
        return units[:whole] + ([units[whole][:rest]] if rest and whole < len(units) else [])
