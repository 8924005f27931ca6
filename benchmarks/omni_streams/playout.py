"""The play-out of streamed audio: when it can begin, and how long a listener hears nothing.

The listener starts at the first chunk and never skips: if a chunk arrives after all audio before it has been played,
the listener waits for it, and that wait is an underrun.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from stagemesh.common.wire.telemetry import Playout


@dataclass(frozen=True)
class Chunk:
    """Audio that arrived at a client: when, in seconds since the request began, and how long it plays."""

    arrival_s: float
    duration_s: float


def first_playable_s(chunks: Sequence[Chunk]) -> float:
    """Returns the earliest arrival of a chunk from which on play-out does not starve at once.

    That is the arrival of the first chunk for which holds: if play-out begins then, the chunks so far last until the
    next chunk arrives. The last chunk always satisfies it.
    """
    buffered_s = accumulate(chunk.duration_s for chunk in chunks)
    following = zip(chunks, buffered_s, [*chunks[1:], None], strict=True)
    return next(
        chunk.arrival_s
        for chunk, ready_s, after in following
        if not after or chunk.arrival_s + ready_s >= after.arrival_s
    )


def worst_underrun_s(chunks: Sequence[Chunk]) -> float:
    """Returns the longest underrun, or 0 if there is none. The listener starts at the first chunk."""
    playout = Playout(chunks[0].arrival_s)
    for chunk in chunks:
        playout.add(chunk.arrival_s, duration_s=chunk.duration_s)
    return playout.longest_underrun_s
