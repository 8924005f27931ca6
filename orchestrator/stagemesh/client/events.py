"""What a request tells its caller while it runs, in the order in which it happens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.common.tensors import Array


@dataclass(frozen=True)
class Queued:
    """The request waits at this place, from 1, for about so long from now. Comes again when the place is another."""

    request_id: str
    position: int
    expected_wait_s: float


@dataclass(frozen=True)
class Admitted:
    """The first event but for Queued: the request is planned and runs, on these replicas (by stage), with this seed."""

    request_id: str
    seed: int
    replicas: Mapping[str, str]


@dataclass(frozen=True)
class Progress:
    """Engine steps that a stage has done, of `total_steps` where it knows."""

    stage: str
    steps: int
    total_steps: int | None


@dataclass(frozen=True)
class Text:
    """Text to append to an output."""

    output: str
    delta: str


@dataclass(frozen=True)
class TokenLogprobs:
    """How probable the model took a token to be, and the most probable ones in its place, the first one first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Tokens:
    """Vocabulary positions to append to an output, with their log-probabilities where those were asked for."""

    output: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, eq=False)
class AudioChunk:
    """Samples to append to an output: float32 in [-1, 1], [samples] or [samples, channels], read-only."""

    output: str
    samples: npt.NDArray[np.float32]
    sample_rate_hz: int

    @property
    def duration_s(self) -> float:
        """How long it sounds."""
        return len(self.samples) / self.sample_rate_hz


@dataclass(frozen=True)
class Image:
    """A whole encoded picture, which replaces an earlier one of the same output."""

    output: str
    data: bytes
    media_type: str


@dataclass(frozen=True, eq=False)
class TensorOutput:
    """Any other tensor, read-only."""

    output: str
    name: str
    tensor: Array


@dataclass(frozen=True)
class Usage:
    """Work that a stage did for the request."""

    prompt_tokens: int
    output_tokens: int
    steps: int


@dataclass(frozen=True)
class Timings:
    """Seconds since the request (or a stage's share of it) was accepted."""

    started_s: float
    first_output_s: float | None
    finished_s: float


@dataclass(frozen=True)
class EdgeUsage:
    """What crossed an edge for the request."""

    edge: str
    connector: str
    chunks: int
    size_bytes: int


@dataclass(frozen=True)
class StageReport:
    """What a stage did for the request."""

    usage: Usage
    timings: Timings
    edges: tuple[EdgeUsage, ...]


@dataclass(frozen=True)
class Finished:
    """The last event of a successful request."""

    stages: Mapping[str, StageReport]
    timings: Timings

    @property
    def edges(self) -> tuple[EdgeUsage, ...]:
        """What crossed all edges."""
        return tuple(edge for stage in self.stages.values() for edge in stage.edges)


Event: TypeAlias = Queued | Admitted | Progress | Text | Tokens | AudioChunk | Image | TensorOutput | Finished
