"""The API between a stage's runtime and its engine: the engine receives tasks and yields events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from stagemesh.common.tensors import Array, Tensors
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.abilities import EngineAbilities

MediaKind: TypeAlias = Literal["image", "audio", "video"]

MEDIA_TYPES: Mapping[MediaKind, Mapping[str, str]] = {
    "image": {
        "image/png": "PNG",
        "image/jpeg": "JPEG",
        "image/webp": "WEBP",
        "image/gif": "GIF",
        "image/bmp": "BMP",
    },
    "audio": {
        "audio/wav": "wav",
        "audio/x-wav": "wav",
        "audio/mpeg": "mp3",
        "audio/flac": "flac",
        "audio/x-flac": "flac",
        "audio/ogg": "ogg",
        "audio/aac": "aac",
        "audio/mp4": "mp4",
        "audio/x-m4a": "mp4",
        "audio/webm": "matroska",
    },
    "video": {
        "video/mp4": "mp4",
        "video/quicktime": "mov",
        "video/webm": "matroska",
        "video/x-matroska": "matroska",
        "video/x-msvideo": "avi",
        "image/gif": "gif",
    },
}
"""The supported media types of each kind, with the format names that Pillow (images) and FFmpeg (others) use."""


@dataclass(frozen=True)
class MediaFile:
    """An encoded image, audio or video file."""

    kind: MediaKind
    data: bytes
    media_type: str


@dataclass(frozen=True, eq=False)
class Samples:
    """Decoded audio: float32[samples] or float32[samples, channels], with values in [-1, 1]."""

    samples: Array
    sample_rate_hz: int

    @property
    def kind(self) -> MediaKind:
        """The kind of medium, always "audio"."""
        return "audio"


Medium: TypeAlias = MediaFile | Samples
Part: TypeAlias = str | Medium
"""One part of a message: text, a media file or audio samples."""


class ChatMessage(NamedTuple):
    """One message of a conversation. `role` is "system", "user" or "assistant"."""

    role: str
    content: str
    parts: Sequence[Part] = ()
    """The message's text and media in order. Replaces `content` if it is not empty."""


Prompt: TypeAlias = str | Sequence[ChatMessage] | Sequence[int]
"""A prompt: text, a conversation, or token ids. The chat template wraps text as a user message."""


def media_of(prompt: Prompt | None) -> Sequence[Medium]:
    """Returns the images, audio and videos of a prompt, in order."""
    if not prompt or isinstance(prompt, str) or isinstance(prompt[0], int):
        return ()
    messages = [message for message in prompt if isinstance(message, ChatMessage)]
    return [part for message in messages for part in message.parts if not isinstance(part, str)]


TokenSelection: TypeAlias = Literal["all", "last"]
"""The rows that are requested of a tensor with one row for each token: "all" rows, or only the rows from the prompt's
"last" token onwards, from which the model samples.

The metadata of packets with such rows contains the position of the first token (`token_start`) and the number of tokens
in the prompt (`prompt_tokens`).
"""


StructureKind: TypeAlias = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Structure:
    """The required format of a task's whole output.

    `texts` contains the choices, or a single schema, regular expression or grammar.
    """

    kind: StructureKind
    texts: tuple[str, ...]


@dataclass(frozen=True)
class SamplingOptions:
    """Options for sampling tokens. The stage's default applies to each option that is None."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False
    bad_words: tuple[str, ...] = ()
    logprobs: int | None = None
    """The number of alternative tokens to report with each token's log-probability. None disables log-probabilities."""
    structure: Structure | None = None


@dataclass(frozen=True)
class Checkpoint:
    """The state from which any replica can resume a task.

    `Engine.submit` yields checkpoints, and `Task.resume_from` is the checkpoint to resume from.
    """

    steps: int
    """The number of completed engine steps."""
    token_ids: tuple[int, ...] = ()
    """The tokens sampled so far."""
    tensors: Tensors = field(default_factory=dict[str, "object"])  # type: ignore[arg-type]
    outputs: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of output fragments so far, by output name. Set by the stage, not by the engine."""
    rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of rows (first axis) emitted so far, by tensor name. Set by the stage. A resumed task emits only later
    rows."""


@dataclass(frozen=True)
class Task:
    """The work that an engine does for one request."""

    request_id: str
    seed: int
    prompt: Prompt | None = None
    tensors: Tensors = field(default_factory=dict[str, "object"])  # type: ignore[arg-type]
    """The tensors of the client's input, by name."""
    sampling: SamplingOptions = SamplingOptions()
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    inlets: Mapping[str, AsyncIterable[Packet]] = field(default_factory=dict[str, AsyncIterable[Packet]])
    """The transformed packets of each incoming edge, by edge name. `input_join` combines them into inputs."""
    apart: frozenset[str] = frozenset()
    """The edges whose packets are separate inputs. One packet from each of the other edges together forms one input."""
    absent: frozenset[str] = frozenset()
    """The accepted tensors that no edge delivers in this request. The stage's signature declares them as optional."""
    attempt: int = 1
    """The number of this attempt at the stage's step of the request, from 1. Emissions do not depend on it."""
    wanted: frozenset[str] | None = None
    """The emitted tensors that an edge or the caller requests. None means all tensors. The engine may skip other
    tensors."""
    tokens: TokenSelection = "all"
    """The rows that an edge or the caller requests, for tensors that have one row for each token."""
    adapter: str | None = None
    """The name of the LoRA adapter to use. None means the model without an adapter."""
    negative_prompt: str = ""
    """A description of content that the output must not show. For engines that generate images."""
    priority: int = 0
    """The priority among waiting tasks. Higher priorities run first."""
    deadline_s: float | None = None
    """The deadline on the event loop's clock, in seconds. None means no deadline."""
    max_steps: int | None = None
    """The number of steps after which the task pauses. None means no limit. For engines with `can_pause`."""
    pause_requested: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    """Event that is set to pause the task after its current step, so that another replica can resume the task. For
    engines with `can_pause`."""
    resume_from: Checkpoint | None = None


class TokenLogprobs(NamedTuple):
    """Log-probabilities of a sampled token and of the most probable tokens, the most probable first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Emission:
    """The tensors that an engine step has produced, for the outgoing edges and the client."""

    packet: Packet
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One item for each token of the packet, for the client only. Empty unless the task requests log-probabilities."""


@dataclass(frozen=True)
class Progress:
    """The progress of a task: the number of completed steps, and the total number, or None if it is unknown."""

    steps: int
    total_steps: int | None = None


@dataclass(frozen=True)
class Usage:
    """The amount of work that a task has completed. The last event of a task that ran to completion."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Paused:
    """The last event of a task that paused, either after `max_steps` or on request."""

    checkpoint: Checkpoint


EngineEvent: TypeAlias = Emission | Progress | Checkpoint | Usage | Paused


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine. `work_s` is the estimated remaining work in seconds, or 0 if the engine is idle."""

    running: int
    queued: int
    work_s: float = 0.0


class Engine(Protocol):
    """The interface of an engine, which runs many tasks at once with continuous batching.

    An engine never blocks the event loop.
    """

    @property
    def abilities(self) -> EngineAbilities:
        """The optional abilities of this engine."""
        ...

    async def start(self, report: Callable[[str], None]) -> None:
        """Loads the model. Called once, before any other method.

        `report` is called with a line of text for each phase of loading.
        """

    def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        """Runs a task and yields its events. The last event is Usage or Paused.

        Closing the generator, or cancelling the coroutine that iterates over it, aborts the engine's task within one
        step and frees the task's resources. A consumer that stops iterating blocks only this task.

        Raises InvalidRequestError if the task cannot run, and UnavailableError if the engine has failed.
        """
        ...

    def load(self) -> EngineLoad: ...

    async def wait_failed(self) -> str:
        """Waits until the engine fails and returns the cause. The process is then restarted."""
        ...

    async def close(self) -> None:
        """Aborts all tasks and frees all resources. May be called more than once."""


class Transform(Protocol):
    """The interface of a transform, which converts the packets of an edge for the edge's consumer.

    Each flow of packets has its own instance. A transform has no side effects.
    """

    def push(self, packet: Packet) -> Sequence[Packet]:
        """Converts a packet. Returns the output packets that are complete, which may be none."""
        ...

    def finish(self) -> Sequence[Packet]:
        """Returns the remaining output packets. Called at the flow's end."""
        ...
