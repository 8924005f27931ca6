"""The trace context and the spans of a step, the continuity of a stream, and histograms for metrics."""

import re
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Self

from stagemesh.v1 import stage_pb2

MAX_SPANS = 4096
"""The maximum number of spans of a step. Further spans are dropped and counted."""
_MAX_LINKS = 32
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_SAMPLED = 1


@dataclass(frozen=True)
class TraceParent:
    """A trace context: the header `traceparent` of W3C Trace Context."""

    trace_id: str
    """The id of the trace, as 32 hexadecimal digits."""
    span_id: str
    """The id of the span in which something happens, as 16 hexadecimal digits."""
    is_sampled: bool

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Returns the trace context in `text`, or None if the text is empty or malformed."""
        found = _TRACEPARENT.fullmatch(text)
        return found and cls(found[1], found[2], bool(int(found[3], 16) & _SAMPLED))

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


class StepTrace:
    """The spans of one traced step, with times in seconds since its begin. Any thread may add spans."""

    def __init__(self, traceparent: str, *, began_s: float | None = None) -> None:
        """`began_s` is the step's begin on Python's monotonic clock. None stands for the present."""
        self.traceparent = traceparent
        """The trace context of the step."""
        self._began_s = time.monotonic() if began_s is None else began_s
        self._spans = deque[stage_pb2.StepSpan]()
        self._count = self._dropped = 0

    @classmethod
    def of(cls, traceparent: str) -> Self | None:
        """Returns a trace without spans, or None if the trace context is malformed or not sampled."""
        parent = TraceParent.parse(traceparent)
        return cls(traceparent) if parent is not None and parent.is_sampled else None

    def __len__(self) -> int:
        """Returns the number of spans that `take` would return or report as dropped."""
        return len(self._spans) + self._dropped

    def add_chunk(self, chunk: stage_pb2.ChunkSpan, *, offered_s: float, acknowledged_s: float) -> None:
        """Adds the span of a chunk. All times, also that in `chunk`, are on Python's monotonic clock."""
        began_s = self._began_s
        chunk.sent_s -= began_s
        self._add(stage_pb2.StepSpan(start_s=offered_s - began_s, end_s=acknowledged_s - began_s, chunk=chunk))

    def take(self) -> stage_pb2.StepSpans:
        """Returns the spans that were added since the last call, and removes them."""
        made = stage_pb2.StepSpans(dropped=self._dropped)
        self._dropped = 0
        while self._spans:
            made.spans.append(self._spans.popleft())
        return made

    def add_call(self, *, seconds: float, requests: int, links: Iterable[str] = ()) -> None:
        """Adds the span of an engine's call that has just ended, after `seconds` seconds, for `requests` requests.

        `links` are the trace contexts of the other traced requests, of which the span has the first 32.
        """
        end_s = time.monotonic() - self._began_s
        call = stage_pb2.CallSpan(requests=requests, links=islice(links, _MAX_LINKS))
        self._add(stage_pb2.StepSpan(start_s=max(0.0, end_s - seconds), end_s=end_s, call=call))

    def _add(self, span: stage_pb2.StepSpan) -> None:
        if self._count < MAX_SPANS:
            self._count += 1
            self._spans.append(span)
        else:
            self._dropped += 1


class Histogram:
    """Counts values by intervals. `bounds` are the upper bounds of the intervals, in ascending order.

    Values above the last bound form an interval of their own. Use it on one thread.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0
        """The sum of all values."""

    def add(self, value: float) -> None:
        """Adds a value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self.sum += value

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self._counts)

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Yields each upper bound as text, and the number of values up to it. The last bound is "+Inf"."""
        return zip([*map(str, self._bounds), "+Inf"], accumulate(self._counts), strict=True)


@dataclass(slots=True)
class Playout:
    """The continuity of one stream. An underrun is a time in which the listener waits for the next part.

    All times are in seconds on one clock: that of the orchestrator when it sends the parts, or that of a client when it
    receives them.
    """

    dry_s: float
    """The time at which all audio so far has been played. Initially the time of the first part."""
    underrun_s: float = 0.0
    """The sum of all underruns."""
    longest_underrun_s: float = 0.0

    def add(self, at_s: float, *, duration_s: float) -> None:
        """Adds a part of `duration_s` seconds, which was sent or received at `at_s`."""
        waited_s = max(0.0, at_s - self.dry_s)
        self.underrun_s += waited_s
        self.longest_underrun_s = max(self.longest_underrun_s, waited_s)
        self.dry_s = max(self.dry_s, at_s) + duration_s
