"""The events of a step for its callers, its timings, and its status reports. Independent of protobuf."""

import time
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import FlowStatus, FlowUsage
from stagemesh.services.engines.base import Checkpoint, Paused, Progress, TokenLogprobs, Usage


@dataclass(frozen=True)
class Accepted:
    """The event of a step that has been accepted. The step's inlets are open."""

    queue_position: int


@dataclass(frozen=True)
class AudioOutput:
    """Audio samples that the client appends to the previous samples."""

    samples: Array
    sample_rate_hz: int


@dataclass(frozen=True)
class ImageOutput:
    """An encoded image file."""

    data: bytes
    media_type: str


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """Token ids that the client appends. Contains their log-probabilities if the request asks for them."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


Content: TypeAlias = str | Tokens | AudioOutput | ImageOutput | Array


class Output(msgspec.Struct, frozen=True, gc=False):
    """A fragment of an output that is streamed to the caller. `seq` counts the fragments of each output from 0.

    The garbage collector ignores these objects, because there is one for each token and they outlive the run.
    """

    name: str
    seq: int
    content: Content


@dataclass(frozen=True)
class Timings:
    """The times of a step's start, first output and end, in seconds since the step was accepted."""

    started_s: float
    first_output_s: float | None
    finished_s: float


class Stopwatch:
    """Measures the timings of a step on the monotonic clock. Starts when it is constructed."""

    def __init__(self) -> None:
        self._accepted_s = time.monotonic()
        self._started_s: float | None = None
        self._first_output_s: float | None = None

    @property
    def age_s(self) -> float:
        """The time since the step was accepted, in seconds."""
        return time.monotonic() - self._accepted_s

    @property
    def started(self) -> bool:
        """Whether the engine has received an input."""
        return self._started_s is not None

    def start(self) -> None:
        """Records the time at which the engine received its first input. Ignores later calls."""
        if self._started_s is None:
            self._started_s = self.age_s

    def first_output(self) -> None:
        """Records the time at which the engine emitted its first output. Ignores later calls."""
        if self._first_output_s is None:
            self._first_output_s = self.age_s

    def timings(self) -> Timings:
        """Returns the step's timings, with the current time as the end of the step."""
        now_s = self.age_s
        started_s = now_s if self._started_s is None else self._started_s
        return Timings(started_s, self._first_output_s, now_s)


@dataclass(frozen=True)
class Finished:
    """The last event of a successful step. The engine has finished the step and all chunks have arrived."""

    usage: Usage
    timings: Timings
    edges: tuple[FlowUsage, ...]


StepEvent: TypeAlias = Accepted | Progress | Output | Checkpoint | Paused | Finished


@dataclass(frozen=True)
class FlowReport:
    """The status of this replica's end of a flow, and the name of the replica at the other end."""

    peer: str
    status: FlowStatus


@dataclass(frozen=True)
class StepReport:
    """The status of a running step at one moment."""

    request_id: str
    step_id: str
    attempt: int
    age_s: float
    """The time since the step was accepted, in seconds."""
    started: bool
    """Whether the engine has received an input."""
    inlets: tuple[FlowReport, ...]
    outlets: tuple[FlowReport, ...]
