"""Records what a client received for one request and when, and finds the flaws."""

import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate, pairwise

from stagemesh.client import Event
from stagemesh.client.responses import Admitted, AudioChunk, Finished, TensorOutput, Text
from tests.soak.workload import Request

_BEGINNING_BYTES = 16
_IN_FLIGHT_S = 1.0


@dataclass(frozen=True)
class Flaws:
    """The number of wrong units, by kind of flaw."""

    duplicated: int = 0
    lost: int = 0
    reordered: int = 0
    altered: int = 0
    """Stretches that do not belong to any unit."""

    def __add__(self, other: "Flaws") -> "Flaws":
        return Flaws(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def __bool__(self) -> bool:
        return self != Flaws()


def flaws(received: bytes, units: Sequence[bytes]) -> Flaws:
    """Compares the received bytes of an output, however they were cut, with the expected units."""
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
    """Returns the numbers of the units in the received bytes, and the number of stretches that match no unit."""
    number_of = {unit: number for number, unit in enumerate(units)}
    sizes = sorted({len(unit) for unit in units}, reverse=True)
    # Few positions begin like a unit, while an altered stretch contains many positions.
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
    """The received pieces of one output."""

    pieces: list[bytes] = field(default_factory=list[bytes])
    times_s: list[float] = field(default_factory=list[float])

    def add(self, piece: bytes) -> None:
        """Adds a piece."""
        self.pieces.append(piece)
        self.times_s.append(time.monotonic())

    def pause_s(self, fault_s: float, *, usual: "Arrivals | None" = None) -> float | None:
        """Returns the length of the pause that a fault caused, in seconds, or None if no piece arrived afterwards.

        Without `usual`, this is the time from the fault to the end of the longest pause. `usual` is the same output
        without a fault, which may have pauses of its own, for example before a sentence. The pause then begins when the
        next part would usually have arrived. Pauses count that began before the fault or soon after, because some
        pieces may have been in flight.
        """
        times_s = self.times_s
        gaps = enumerate(pairwise(times_s), 1)
        ends = [n for n, (begin_s, end_s) in gaps if end_s > fault_s and begin_s < fault_s + _IN_FLIGHT_S]
        if not ends:
            return None
        if usual is None:
            return times_s[max(ends, key=lambda n: times_s[n] - times_s[n - 1])] - fault_s
        begins = [0, *accumulate(map(len, self.pieces))]
        last = max(0, bisect_right(times_s, fault_s) - 1)
        # The difference of the clocks of the two deliveries. A part that was due before the fault was due at the fault.
        shift_s = times_s[last] - usual.arrival_s(begins[last])
        shift_s = max(shift_s, fault_s - usual.arrival_s(begins[last + 1]))
        return max(0.0, *(times_s[n] - shift_s - usual.arrival_s(begins[n]) for n in ends))

    @property
    def size_bytes(self) -> int:
        """The number of bytes that have arrived."""
        return sum(map(len, self.pieces))

    def arrival_s(self, position: int) -> float:
        """Returns the time at which the byte at a position arrived, or the time of the last one if there are fewer."""
        ends = list(accumulate(map(len, self.pieces)))
        return self.times_s[min(bisect_right(ends, position), len(ends) - 1)]


class Delivery:
    """The events of one request, as they arrive."""

    def __init__(self, request: Request, units: Mapping[str, Sequence[bytes]]) -> None:
        """`units` are the expected units of each output."""
        self.request = request
        self.outputs = {output: Arrivals() for output in units}
        self.begun_s = time.monotonic()
        self.ended_s = self.begun_s
        self.error = ""
        self._units = units
        self._admitted = self._finished = self._disorder = 0

    def add(self, event: Event) -> None:
        """Adds the next event."""
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
        """Returns all received bytes of an output."""
        return b"".join(self.outputs[output].pieces)

    def flaws(self) -> Flaws:
        """Returns the flaws of the received outputs. A failed request is compared as far as it got."""
        found = Flaws(altered=self._disorder)
        for output in self.outputs:
            received = self.received(output)
            expected = self._units[output] if not self.error else self._first_units(output, len(received))
            found += flaws(received, expected)
        return found

    def whole(self) -> bool:
        """Whether the client received the end of the request."""
        return not self.error and self._finished == 1 and self._admitted >= 1

    def _first_units(self, output: str, size_bytes: int) -> list[bytes]:
        """Returns the units in the first `size` bytes; the last one may be cut."""
        ends = list(accumulate(len(unit) for unit in self._units[output]))
        whole = bisect_right(ends, size_bytes)
        rest = size_bytes - (ends[whole - 1] if whole else 0)
        units = list(self._units[output])
        return units[:whole] + ([units[whole][:rest]] if rest and whole < len(units) else [])
