"""The events of a running request in the order in which they happen, and their decoding from the wire."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.tensors import Array, read_inline
from stagemesh.v1 import orchestrator_pb2, request_pb2, stage_pb2


@dataclass(frozen=True)
class Queued:
    """The request waits for admission. The event is sent again each time the request's position changes."""

    request_id: str
    position: int
    """The position in the queue. The first position is 1."""
    expected_wait_s: float


@dataclass(frozen=True)
class Admitted:
    """The request is planned and runs. This is the first event of a request, except for `Queued`."""

    request_id: str
    seed: int
    replicas: Mapping[str, str]
    """The names of the chosen replicas by stage."""


@dataclass(frozen=True)
class Progress:
    """The number of engine steps that a stage has completed.

    `total_steps` is None if the stage does not know the total in advance.
    """

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
    """A token's log-probability, and the most probable tokens at its position in descending order."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Tokens:
    """Vocabulary ids to append to an output.

    `logprobs` has one entry for each id if the request asked for log-probabilities.
    """

    output: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, eq=False)
class AudioChunk:
    """Audio samples to append to an output: read-only float32 in [-1, 1], [samples] or [samples, channels]."""

    output: str
    samples: npt.NDArray[np.float32]
    sample_rate_hz: int

    @property
    def duration_s(self) -> float:
        """The playing time in seconds."""
        return len(self.samples) / self.sample_rate_hz


@dataclass(frozen=True)
class Image:
    """A complete encoded image. It replaces an earlier image of the same output."""

    output: str
    data: bytes
    media_type: str


@dataclass(frozen=True, eq=False)
class TensorOutput:
    """A read-only tensor of an output that is not text, tokens, audio or an image."""

    output: str
    name: str
    tensor: Array


@dataclass(frozen=True)
class Usage:
    """The amount of work that a stage did for the request."""

    prompt_tokens: int
    output_tokens: int
    steps: int


@dataclass(frozen=True)
class Timings:
    """Times in seconds since the request was accepted.

    In a stage's report, the times start when the stage accepted its step.
    """

    started_s: float
    first_output_s: float | None
    finished_s: float


@dataclass(frozen=True)
class EdgeUsage:
    """The amount of data that crossed an edge for the request."""

    edge: str
    connector: str
    chunks: int
    size_bytes: int


@dataclass(frozen=True)
class StageReport:
    """The work, the times and the sent data of one stage."""

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
        """The usage of all edges."""
        return tuple(edge for stage in self.stages.values() for edge in stage.edges)


Event: TypeAlias = Queued | Admitted | Progress | Text | Tokens | AudioChunk | Image | TensorOutput | Finished


def decode_event(response: orchestrator_pb2.GenerateResponse) -> Event | None:
    """Returns the event in `response`, or None for a kind that this client does not know.

    Raises InvalidChunkError for audio or tensors whose shape, type or size is inconsistent.
    """
    match response.WhichOneof("event"):
        case "admitted":
            admitted = response.admitted
            return Admitted(admitted.request_id, admitted.seed, dict(admitted.replicas))
        case "queued":
            queued = response.queued
            return Queued(queued.request_id, queued.position, queued.expected_wait_s)
        case "progress":
            return _progress(response.progress)
        case "output":
            return _output(response.output)
        case "finished":
            stages = {name: _report(stage) for name, stage in response.finished.stages.items()}
            return Finished(stages, _timings(response.finished.timings))
        case None:
            return None


def _progress(message: orchestrator_pb2.RequestProgress) -> Progress:
    steps = message.progress
    return Progress(message.stage, steps.steps, steps.total_steps if steps.HasField("total_steps") else None)


def _output(message: request_pb2.Output) -> Event | None:
    match message.WhichOneof("content"):
        case "text":
            return Text(message.name, message.text)
        case "token_ids":
            logprobs = tuple(
                TokenLogprobs(each.logprob, tuple(each.top_ids), tuple(each.top_logprobs)) for each in message.logprobs
            )
            return Tokens(message.name, tuple(message.token_ids.ids), logprobs)
        case "audio":
            return _audio(message.name, message.audio)
        case "image":
            return Image(message.name, message.image.data, message.image.media_type)
        case "tensor":
            return TensorOutput(message.name, message.tensor.name, read_inline(message.tensor))
        case None:
            return None


def _audio(output: str, message: request_pb2.Audio) -> AudioChunk:
    samples = read_inline(message.samples)
    if samples.dtype != np.float32 or samples.ndim not in (1, 2) or message.sample_rate_hz < 1:
        raise InvalidChunkError(
            f"output {output!r} is {samples.dtype}{list(samples.shape)} at {message.sample_rate_hz} Hz; audio must be "
            "float32[samples] or float32[samples, channels] at 1 Hz or more; fix the stage that produces it"
        )
    return AudioChunk(output, samples.view(np.float32), message.sample_rate_hz)


def _report(message: stage_pb2.StepFinished) -> StageReport:
    usage = message.usage
    edges = tuple(EdgeUsage(edge.edge, edge.connector, edge.chunks, edge.size_bytes) for edge in message.edges)
    return StageReport(Usage(usage.prompt_tokens, usage.output_tokens, usage.steps), _timings(message.timings), edges)


def _timings(message: request_pb2.Timings) -> Timings:
    first_s = message.first_output_s if message.HasField("first_output_s") else None
    return Timings(message.started_s, first_s, message.finished_s)
