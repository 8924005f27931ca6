"""The API between a stage's runtime and its engine: tasks in, events out."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from stagemesh.common.tensors import Tensors
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.media import Medium, Part


class ChatMessage(NamedTuple):
    """One message of a conversation; `role` is system, user or assistant."""

    role: str
    content: str
    parts: Sequence[Part] = ()
    """Text and media in order, instead of `content`."""


Prompt: TypeAlias = str | Sequence[ChatMessage] | Sequence[int]
"""Text (wrapped by the chat template as a user message), a conversation, or token ids."""


def media_of(prompt: Prompt | None) -> Sequence[Medium]:
    """Returns the images, audio and videos of a prompt, in order."""
    if not prompt or isinstance(prompt, str) or isinstance(prompt[0], int):
        return ()
    messages = [message for message in prompt if isinstance(message, ChatMessage)]
    return [part for message in messages for part in message.parts if not isinstance(part, str)]


TokenSelection: TypeAlias = Literal["all", "last"]
"""Whether a tensor has rows for every token that the model processes, or only for those from which it samples a token.

The metadata of packets with such rows holds the position of the first token (`token_start`) and the number of tokens in
the prompt (`prompt_tokens`).
"""


StructureKind: TypeAlias = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Structure:
    """The format of a task's whole output. `texts` holds the choices, or the one schema, expression or grammar."""

    kind: StructureKind
    texts: tuple[str, ...]


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are sampled. None stands for the stage's default."""

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
    """The number of alternatives to report with each token's log-probability; None for no log-probabilities."""
    structure: Structure | None = None


@dataclass(frozen=True)
class Checkpoint:
    """The state from which this or another replica can resume a task. An event of one task, an input of the next."""

    steps: int
    """The number of engine steps done."""
    token_ids: tuple[int, ...] = ()
    """The tokens sampled so far."""
    tensors: Tensors = field(default_factory=dict[str, "object"])  # type: ignore[arg-type]
    outputs: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of outputs so far, by name. Set by the stage, not by the engine."""
    rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of emitted rows (first axis) so far, by tensor. Set by the stage. A resumed task emits the rows after
    them."""


@dataclass(frozen=True)
class Task:
    """The work of one request for an engine."""

    request_id: str
    seed: int
    prompt: Prompt | None = None
    tensors: Tensors = field(default_factory=dict[str, "object"])  # type: ignore[arg-type]
    """The tensors of the client's input."""
    sampling: SamplingOptions = SamplingOptions()
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    inlets: Mapping[str, AsyncIterable[Packet]] = field(default_factory=dict[str, AsyncIterable[Packet]])
    """The transformed packets of each incoming edge, by edge name; `input_join` combines them."""
    apart: frozenset[str] = frozenset()
    """The edges whose packets are inputs of their own. One packet from each other edge makes one input together."""
    absent: frozenset[str] = frozenset()
    """The accepted tensors that no edge brings in this request. The stage's signature declares them as optional."""
    attempt: int = 1
    """The attempt at this stage's part of the request, from 1. Emissions do not depend on it."""
    wanted: frozenset[str] | None = None
    """The emitted tensors that an edge or the caller takes; None for all. An engine need not compute the others."""
    tokens: TokenSelection = "all"
    """The rows that an edge or the caller takes, for tensors with a row per token."""
    adapter: str | None = None
    """The name of the LoRA adapter to use; see `abilities.AdapterControl`."""
    negative_prompt: str = ""
    """What the output must not show. For engines that generate images."""
    priority: int = 0
    """Waiting tasks with higher priority run first."""
    deadline_s: float | None = None
    """The deadline in the event loop's time; None for no deadline."""
    max_steps: int | None = None
    """The number of steps after which to pause; for engines with `can_pause`."""
    pause_requested: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    """Set to pause the task after its current step, so that it can resume elsewhere; for engines with `can_pause`."""
    resume_from: Checkpoint | None = None


class TokenLogprobs(NamedTuple):
    """The log-probability of a sampled token and those of the most probable tokens, the most probable first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Emission:
    """Tensors that a step has made, for the outgoing edges and the client."""

    packet: Packet
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token of the packet, for the client only. Empty unless the task asks for them."""


@dataclass(frozen=True)
class Progress:
    """The number of steps done so far, and the total if it is known."""

    steps: int
    total_steps: int | None = None


@dataclass(frozen=True)
class Usage:
    """The amount of work done. The last event of a task that ran to its end."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Paused:
    """The task has paused before its end, after `max_steps` or on request. The last event of a task that pauses."""

    checkpoint: Checkpoint


EngineEvent: TypeAlias = Emission | Progress | Checkpoint | Usage | Paused


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine. `work_s` is its estimate of the remaining seconds of work, 0 if it is idle."""

    running: int
    queued: int
    work_s: float = 0.0


class Engine(Protocol):
    """Runs many tasks at once with continuous batching. Never blocks the event loop."""

    @property
    def abilities(self) -> EngineAbilities:
        """The optional abilities of this engine."""
        ...

    async def start(self, report: Callable[[str], None]) -> None:
        """Loads the model. Called once, before any other method. `report` is called with a line for each phase."""

    def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        """Runs a task; yields its events, of which the last is Usage or Paused.

        Closing the generator, or cancelling the task that iterates over it, aborts the engine's task within one step
        and frees its resources. A consumer that stops iterating blocks this task only.

        Raises InvalidRequestError if the task cannot run, UnavailableError if the engine has died.
        """
        ...

    def load(self) -> EngineLoad:
        """Returns the current load."""
        ...

    async def wait_failed(self) -> str:
        """Returns the cause once the engine has died. The process is then restarted. Never returns otherwise."""
        ...

    async def close(self) -> None:
        """Aborts all tasks and frees all resources. Closing twice is harmless."""


class Transform(Protocol):
    """Converts the packets of an edge to what its consumer accepts. One instance per flow, without side effects."""

    def push(self, packet: Packet) -> Sequence[Packet]:
        """Returns the packets that this one completes."""
        ...

    def finish(self) -> Sequence[Packet]:
        """Returns the remaining packets at the flow's end."""
        ...
