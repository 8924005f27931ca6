"""The contract between a stage's runtime and whatever computes."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from stagemesh.common.tensors import Tensors
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.media import Medium, Part


class ChatMessage(NamedTuple):
    """One turn of a conversation; `role` is system, user or assistant."""

    role: str
    content: str
    parts: Sequence[Part] = ()
    """Instead of `content`: what is said and shown, in order."""


Prompt: TypeAlias = str | Sequence[ChatMessage] | Sequence[int]
"""Text (put through the chat template as a user message), a conversation, or token ids."""


def media_of(prompt: Prompt | None) -> Sequence[Medium]:
    """The pictures, sounds and films of a prompt, in order."""
    if not prompt or isinstance(prompt, str) or isinstance(prompt[0], int):
        return ()
    messages = [message for message in prompt if isinstance(message, ChatMessage)]
    return [part for message in messages for part in message.parts if not isinstance(part, str)]


TokenSelection: TypeAlias = Literal["all", "last"]
"""Rows for every token that goes through the model, or for those alone from which a token is sampled.

Packets with such rows say in their metadata at which token they start (`token_start`) and how many the prompt has
(`prompt_tokens`).
"""


StructureKind: TypeAlias = Literal["json_schema", "regex", "choice", "grammar"]


@dataclass(frozen=True)
class Structure:
    """What the whole output of a task must be: `texts` are the choices, or the one schema, expression or grammar."""

    kind: StructureKind
    texts: tuple[str, ...]


@dataclass(frozen=True)
class SamplingOptions:
    """How tokens are picked; None takes the stage's default."""

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
    """How many alternatives each sampled token's log-probability is to come with; None for no log-probabilities."""
    structure: Structure | None = None


@dataclass(frozen=True)
class Checkpoint:
    """Enough of a task's state to continue it, here or on another replica. An event, and a task's beginning."""

    steps: int
    """Engine steps done."""
    token_ids: tuple[int, ...] = ()
    """Tokens sampled so far."""
    tensors: Tensors = field(default_factory=dict[str, "object"])  # type: ignore[arg-type]
    outputs: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many outputs of each name had been made; set by the stage, not by the engine."""
    rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """How many rows of each tensor had been emitted, along its first axis; set by the stage. A task that resumes emits
    those after them."""


@dataclass(frozen=True)
class Task:
    """One request's share of work for an engine."""

    request_id: str
    seed: int
    prompt: Prompt | None = None
    tensors: Tensors = field(default_factory=dict[str, "object"])  # type: ignore[arg-type]
    """The client's tensors."""
    sampling: SamplingOptions = SamplingOptions()
    options: Mapping[str, float] = field(default_factory=dict[str, float])
    inlets: Mapping[str, AsyncIterable[Packet]] = field(default_factory=dict[str, AsyncIterable[Packet]])
    """What comes over each incoming edge, transformed already, by edge name; see `joining`."""
    apart: frozenset[str] = frozenset()
    """The edges whose packets are inputs of their own; one packet of each of the others makes one input together."""
    absent: frozenset[str] = frozenset()
    """Accepted tensors that no edge brings in this request; the stage's signature has them as optional."""
    attempt: int = 1
    """The try at this stage's share of the request, from 1. What is emitted does not depend on it."""
    wanted: frozenset[str] | None = None
    """The emitted tensors that somebody takes; None for all. What costs something is not emitted for nobody."""
    tokens: TokenSelection = "all"
    """Of tensors with a row for each token, the rows that somebody takes."""
    adapter: str | None = None
    """The adapter to compute with, by name; see `abilities.AdapterControl`."""
    negative_prompt: str = ""
    """What the output is not to show; for engines that make pictures."""
    priority: int = 0
    """Higher goes first where tasks wait for each other."""
    deadline_s: float | None = None
    """When it must be done, by the event loop's clock."""
    max_steps: int | None = None
    """Pause after so many steps; for engines with `can_pause`."""
    pause_requested: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    """Set while it runs, to have it go on elsewhere; for engines with `can_pause`, too."""
    resume_from: Checkpoint | None = None


class TokenLogprobs(NamedTuple):
    """How probable a model took a sampled token to be, and the most probable ones in its place, the first one first."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class Emission:
    """Tensors made by a step, for outgoing edges and the client alike."""

    packet: Packet
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Of the packet's tokens, one each, for the client alone; empty unless they were asked for."""


@dataclass(frozen=True)
class Progress:
    """Steps done so far."""

    steps: int
    total_steps: int | None = None


@dataclass(frozen=True)
class Usage:
    """Work done; the last event of a task."""

    prompt_tokens: int = 0
    output_tokens: int = 0
    steps: int = 0


@dataclass(frozen=True)
class Paused:
    """The task has done its `max_steps`, or was asked to pause, and is not at its end; the last event then."""

    checkpoint: Checkpoint


EngineEvent: TypeAlias = Emission | Progress | Checkpoint | Usage | Paused


@dataclass(frozen=True)
class EngineLoad:
    """What an engine has to do; `work_s` is its own estimate of the seconds left, 0 where idle."""

    running: int
    queued: int
    work_s: float = 0.0


class Engine(Protocol):
    """Computes for many tasks at once, batching continuously, and never blocks the event loop."""

    @property
    def abilities(self) -> EngineAbilities:
        """The abilities that this engine has."""
        ...

    async def start(self, report: Callable[[str], None]) -> None:
        """Loads the model; `report` takes a line for people at each phase. Called once, before anything else."""

    def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        """Runs a task: an async generator that ends with Usage, or with Paused. Closing it, or cancelling whoever
        iterates, aborts the task within one step and frees what it held. Not iterating on holds this task up and no
        other.

        Raises InvalidRequestError for a task that cannot run, UnavailableError when the engine has died.
        """
        ...

    def load(self) -> EngineLoad:
        """The load at this moment."""
        ...

    async def wait_failed(self) -> str:
        """Returns only if the engine dies, with the cause; the process is then ended and started anew."""
        ...

    async def close(self) -> None:
        """Aborts all tasks and frees everything. Closing twice is harmless."""


class Transform(Protocol):
    """Turns what an edge carries into what its consumer takes; one instance a flow, without side effects."""

    def push(self, packet: Packet) -> Sequence[Packet]:
        """The packets that are complete with this one."""
        ...

    def finish(self) -> Sequence[Packet]:
        """The packets that were held back, at the flow's end."""
        ...
