"""The measurements of a request, and the figures that are computed from them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import NamedTuple

from stagemesh.common.wire.telemetry import Playout


class Failure(NamedTuple):
    """The error of a request. `reason` is that of docs/errors.md or of the server."""

    reason: str
    message: str
    is_final: bool = False
    """Whether the same request would always fail, for example because it is invalid."""


@dataclass
class Measurement:
    """The measurements of one request. All times are on the clock of the load, in seconds since the load began."""

    due_s: float
    """The time at which the request should be sent. Latencies count from this time."""
    sent_s: float
    ended_s: float = 0.0
    texts_s: list[float] = field(default_factory=list[float])
    """The arrival of each piece of text."""
    audio_chunks_s: list[float] = field(default_factory=list[float])
    """The arrival of each piece of audio."""
    audio_s: float = 0.0
    """The playing time of all audio."""
    output_tokens: int = 0
    failure: Failure | None = None
    playout: Playout | None = None
    """The continuity of the audio. None before the first audio."""

    def add_text(self, now_s: float) -> None:
        """Records text that arrived at `now_s`."""
        self.texts_s.append(now_s)

    def add_audio(self, now_s: float, *, duration_s: float) -> None:
        """Records audio that arrived at `now_s` and plays for `duration_s` seconds. Ignores audio without samples."""
        if not duration_s:
            return
        self.audio_chunks_s.append(now_s)
        self.audio_s += duration_s
        if self.playout is None:
            self.playout = Playout(now_s)
        self.playout.add(now_s, duration_s=duration_s)


@dataclass(frozen=True)
class Figure:
    """A figure of requests.

    `values` returns the values of one request: one value, none if the request has no such output, or one for each
    pause between two pieces.
    """

    key: str
    """The name in the JSON document, with its unit."""
    title: str
    values: Callable[[Measurement], Sequence[float]]
    is_time: bool = True
    needs_value: bool = True
    """Whether a request without a value misses a limit of the figure."""


def _first(one: Measurement, arrivals_s: Sequence[float]) -> list[float]:
    return [at_s - one.due_s for at_s in arrivals_s[:1]]


def _gaps(arrivals_s: Sequence[float]) -> list[float]:
    return [later_s - earlier_s for earlier_s, later_s in pairwise(arrivals_s)]


def _playout(one: Measurement, value: Callable[[Playout], float]) -> list[float]:
    return [] if one.playout is None else [value(one.playout)]


FIGURES: Mapping[str, Figure] = {
    "ttft": Figure("ttft_s", "time to first text", lambda one: _first(one, one.texts_s)),
    "ttfa": Figure("ttfa_s", "time to first audio", lambda one: _first(one, one.audio_chunks_s)),
    "e2e": Figure("e2e_s", "end to end", lambda one: [one.ended_s - one.due_s]),
    "inter_token": Figure("inter_token_s", "between texts", lambda one: _gaps(one.texts_s), needs_value=False),
    "inter_chunk": Figure(
        "inter_chunk_s", "between audio chunks", lambda one: _gaps(one.audio_chunks_s), needs_value=False
    ),
    "underrun": Figure(
        "worst_underrun_s", "worst underrun", lambda one: _playout(one, lambda each: each.longest_underrun_s)
    ),
    "total_underrun": Figure(
        "total_underrun_s", "total underrun", lambda one: _playout(one, lambda each: each.underrun_s)
    ),
    "rtf": Figure(
        "rtf",
        "real-time factor",
        lambda one: [(one.ended_s - one.due_s) / one.audio_s] if one.audio_s else [],
        is_time=False,
    ),
    "tokens": Figure(
        "output_tokens", "output tokens", lambda one: [one.output_tokens] if one.output_tokens else [], is_time=False
    ),
    "audio": Figure("audio_s", "audio", lambda one: [one.audio_s] if one.audio_s else []),
    "lag": Figure("lag_s", "sent late", lambda one: [one.sent_s - one.due_s]),
}
"""The figures by the names that the option --limit accepts."""


def meets(one: Measurement, limits: Mapping[str, float]) -> bool:
    """Returns whether a request succeeded and none of its values exceeds its limit.

    `limits` are the highest accepted values by the name of their figure. A request without text, audio or tokens misses
    the limits of figures about them.
    """
    return one.failure is None and all(_is_met(FIGURES[name], one, limit) for name, limit in limits.items())


def _is_met(figure: Figure, one: Measurement, limit: float) -> bool:
    values = figure.values(one)
    return bool(values or not figure.needs_value) and all(value <= limit for value in values)
