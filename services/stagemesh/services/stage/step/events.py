"""What a caller of ExecuteStep hears, free of the wire."""

from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import FlowUsage
from stagemesh.services.engines.base import Checkpoint, Paused, Progress, TokenLogprobs, Usage


@dataclass(frozen=True)
class Accepted:
    """The step is known, its inlets are open."""

    queue_position: int


@dataclass(frozen=True)
class AudioOutput:
    """Samples to append."""

    samples: Array
    sample_rate_hz: int


@dataclass(frozen=True)
class ImageOutput:
    """An encoded picture."""

    data: bytes
    media_type: str


class Tokens(msgspec.Struct, frozen=True, gc=False):
    """Vocabulary positions to append, with their log-probabilities where those were asked for."""

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


Content: TypeAlias = str | Tokens | AudioOutput | ImageOutput | Array


class Output(msgspec.Struct, frozen=True, gc=False):
    """A piece of a streamed tensor, numbered by name from 0.

    There is one for every token, kept beyond the run's end: the garbage collector need not look at them.
    """

    name: str
    seq: int
    content: Content


@dataclass(frozen=True)
class Timings:
    """Seconds since the step was accepted."""

    started_s: float
    first_output_s: float | None
    finished_s: float


@dataclass(frozen=True)
class Finished:
    """The engine is done and all chunks have arrived."""

    usage: Usage
    timings: Timings
    edges: tuple[FlowUsage, ...]


StepEvent: TypeAlias = Accepted | Progress | Output | Checkpoint | Paused | Finished
