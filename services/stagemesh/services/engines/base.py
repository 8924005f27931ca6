"""The API between a stage's runtime and the stage's engine. The engine receives tasks and yields events."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol, TypeAlias

from stagemesh.common.errors import StagemeshError
from stagemesh.common.wire.telemetry import StepTrace
from stagemesh.common.wire.tensors import Tensors, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.prompts import Prompt

TokenSelection: TypeAlias = Literal["all", "last"]
"""Selects rows of a tensor that has one row for each token.

"all" selects every row. "last" selects the rows from the prompt's last token onwards. The model samples the first
output token from the row of the prompt's last token.

The metadata of packets with such rows contains the position of the first token (`token_start`) and the number of tokens
in the prompt (`prompt_tokens`).
"""


StructureKind: TypeAlias = Literal["json_schema", "regex", "allowed_texts", "grammar"]


@dataclass(frozen=True)
class Structure:
    """The format that the whole output of a task must have.

    `texts` contains the allowed texts, or else a single JSON schema, regular expression or grammar.
    """

    kind: StructureKind
    texts: tuple[str, ...]


@dataclass(frozen=True)
class SamplingOptions:
    """Options for sampling tokens. None means the stage's default for the option."""

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
    prompt_logprobs: int | None = None
    """The number of alternative tokens to report with each token of the prompt. None disables the report."""
    tokens_only: bool = False
    """Whether only the tokens of the prompt are reported, in `Usage.prompt_logprobs`. The model does not run."""
    count_tokens: bool = False
    """Whether emissions have `Emission.counts`."""


@dataclass(frozen=True)
class Checkpoint:
    """The state of a task from which any replica of the stage can resume the task.

    `Engine.submit` yields checkpoints. A resumed task contains its checkpoint in `Task.resume_from`.
    """

    steps: int
    """The number of engine steps that the task has completed."""
    token_ids: tuple[int, ...] = ()
    """The tokens sampled so far."""
    tensors: Tensors = field(default_factory=dict[str, "object"])  # type: ignore[arg-type]
    outputs: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of output fragments emitted so far, by output name. Set by the stage, not by the engine."""
    rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of rows (first axis) emitted so far, by tensor name. Set by the stage, not by the engine.

    A resumed task emits only later rows.
    """


@dataclass(frozen=True)
class Task:
    """The work that an engine does for one request."""

    request_id: str
    seed: int
    prompt: Prompt | None = None
    tensors: Tensors = field(default_factory=dict[str, "object"])  # type: ignore[arg-type]
    """The tensors that the client sent with the request, by name."""
    sampling: SamplingOptions = SamplingOptions()
    options: Mapping[str, Value] = field(default_factory=dict[str, Value])
    """The options that the request sets for the stage, by name. `request_options` adds the defaults."""
    inlets: Mapping[str, AsyncIterable[Packet]] = field(default_factory=dict[str, AsyncIterable[Packet]])
    """The packets of each incoming edge after the edge's transform, by edge name.

    `input_join` combines the packets into inputs. An engine may end before it has read an edge to its end. The stage
    then discards the rest.
    """
    apart: frozenset[str] = frozenset()
    """The names of the edges that are not joined: each packet of such an edge is a separate input.

    One packet from each of the other edges together forms one input.
    """
    absent: frozenset[str] = frozenset()
    """The names of the optional tensors that no edge delivers in this request.

    The stage's signature declares which accepted tensors are optional.
    """
    attempt: int = 1
    """The number of this attempt at the stage's step of the request, counted from 1.

    The engine's output must not depend on the attempt.
    """
    wanted: frozenset[str] | None = None
    """The names of the tensors that an edge or the caller requests. None means all tensors that the stage emits.

    The engine may skip all other tensors.
    """
    tokens: TokenSelection = "all"
    """The rows that an edge or the caller requests of each tensor that has one row for each token."""
    parsed: bool = False
    """Whether the engine may emit messages with the text (`Emission.message`)."""
    adapter: str | None = None
    """The LoRA adapters to apply: a name, or several with scales (`parse_adapters`) if the engine can mix adapters.

    None means the model without an adapter.
    """
    negative_prompt: str | None = None
    """A description of content that the output must not show. None if there is none, which differs from an empty text.

    Used by engines that generate images.
    """
    priority: int = 0
    """The priority among waiting tasks. Tasks with higher priority run first."""
    deadline_s: float | None = None
    """The task's deadline in seconds on the event loop's clock. None if the task has no deadline."""
    max_steps: int | None = None
    """The number of steps after which the task pauses. None means no limit. Used by engines with `can_pause`."""
    pause_requested: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    """An event that tells the engine to pause the task after its current step. Used by engines with `can_pause`.

    Another replica can then resume the task.
    """
    resume_from: Checkpoint | None = None
    trace: StepTrace | None = field(default=None, compare=False)
    """The spans of the step, or None if the request is not traced.

    An engine that computes several requests together adds its calls by `trace_call`.
    """


class TokenLogprob(NamedTuple):
    """A token with its text and its log-probability, as defined by `TokenLogprob` in request.proto."""

    id: int
    text: str
    logprob: float


class TokenLogprobs(NamedTuple):
    """The log-probability of a sampled token, and those of the most probable tokens, the most probable first."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...]
    position: int
    """The position of the sampled token's text in the task's whole text, in bytes of UTF-8."""


class MessageDelta(NamedTuple):
    """A part of a language model's message: a piece of reasoning, of text or of a tool call."""

    kind: Literal["reasoning", "text", "tool_call"]
    text: str
    """Text to append. In a tool call, the text belongs to the arguments."""
    call: int = 0
    """The index of the tool call within the message."""
    id: str = ""
    """The id of the tool call, the same in each of its parts."""
    name: str = ""
    """Text to append to the name of the tool call."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """The log-probabilities of the tokens that were sampled since the last part. Empty unless the task requests them.

    The position of a token is the length of the message before it, in bytes of UTF-8.
    """

    @property
    def length(self) -> int:
        """The number of bytes of UTF-8 that the part adds to the message."""
        return len(self.name.encode()) + len(self.text.encode())


@dataclass(slots=True, eq=False)
class Emission:
    """The tensors that one engine step has produced. They are sent over the outgoing edges and to the client."""

    # Not frozen, because an emission is created for every token and a frozen dataclass would be three times slower.

    packet: Packet
    logprobs: tuple[TokenLogprobs, ...] = ()
    """The log-probabilities for each token of the packet, for the client only. Empty unless the task requests them."""
    text_logprobs: tuple[TokenLogprobs, ...] = ()
    """The log-probabilities of the tokens that begin in the packet's text, for the client only.

    The packet's text then ends with a whole character. Empty unless the task requests them.
    """
    message: Sequence[MessageDelta] | None = None
    """The parts of the message that the caller receives instead of the text. None if the caller receives the text.

    Either all emissions of a task have messages, or none has. Allowed only if `Task.parsed` is True.
    """
    counts: tuple[int, int] | None = None
    """The number of tokens in the prompt, and of those sampled so far. None unless the task requests it."""
    non_finite: tuple[str, ...] = ()
    """The names of the tensors that the engine has converted from NaN or infinite values, such as an image's pixels."""


@dataclass(frozen=True)
class Progress:
    """The progress of a task, as the number of completed steps. `total_steps` is None if the total is unknown."""

    steps: int
    total_steps: int | None = None


@dataclass(frozen=True)
class Finish:
    """Why a task's outputs end. `stop_text` or `stop_token_id` is what stopped them, if the reason is "stop"."""

    reason: Literal["end", "stop", "length", "limit"] = "end"
    stop_text: str | None = None
    stop_token_id: int | None = None


END = Finish()
"""The outputs are complete."""


@dataclass(slots=True)
class Usage:
    """The amount of work that a task has done. The last event of a task that ran to completion.

    An engine may yield the object earlier, too, and update it while the task runs. The work of a task that fails or is
    cancelled is then known.
    """

    prompt_tokens: int = 0
    output_tokens: int = 0
    engine_steps: int = 0
    cached_tokens: int = 0
    """The tokens of the prompt whose states were found in a cache."""
    media_tokens: int = 0
    """The tokens of the prompt that stand for images, audio or video."""
    images: int = 0
    frames: int = 0
    """The images and the video frames that were produced, without previews."""
    finish: Finish = END
    """Why the outputs end. Used if the task runs to completion."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """The log-probabilities of the prompt's tokens. Empty unless the task requests them.

    The first token has no alternatives and the log-probability 0.
    """
    context_tokens: int = 0
    """The maximum number of tokens in a prompt and its output together. 0 if there is no such limit."""
    warnings: Sequence[StagemeshError] = ()
    """The deviations from the task that do not fail it, such as a rounded size. The client receives them."""


@dataclass(frozen=True)
class Paused:
    """The last event of a paused task, with the checkpoint from which the task can resume.

    A task pauses after `Task.max_steps` steps or on request.
    """

    checkpoint: Checkpoint


EngineEvent: TypeAlias = Emission | Progress | Checkpoint | Usage | Paused


@dataclass(frozen=True)
class EngineLoad:
    """The load of an engine: the numbers of running and of queued tasks, and the estimated remaining work.

    `work_s` is the time until all tasks have finished, in seconds, 0 if the engine is idle, or None if it does not
    estimate this time.
    """

    running: int
    queued: int
    work_s: float | None = None
    call_costs_s: Mapping[int, float] = field(default_factory=dict[int, float])
    """The mean duration of calls that make audio, in seconds, by their number of frames rounded up to a power of 2."""
    frame_audio_s: float = 0.0
    """The mean duration of the audio that the engine makes of one frame, in seconds. 0 if it is not measured."""
    audio_delay_s: float = 0.0
    """The mean duration of the audio that the engine retains of a request's frames until the next ones arrive, in
    seconds.
    """


class Engine(Protocol):
    """The interface of an engine, which runs many tasks at the same time.

    An engine never blocks the event loop.
    """

    @property
    def abilities(self) -> EngineAbilities:
        """The optional abilities of this engine. Some fields are valid only after `start`."""
        ...

    async def start(self, report: Callable[[str], None]) -> None:
        """Loads the model. Called once, before tasks are submitted.

        Calls `report` with a line of text for each phase of loading.
        """

    def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        """Runs a task and yields its events. The last event is Usage or Paused.

        If the generator is closed, or the coroutine that iterates over it is cancelled, the engine stops the task
        within one step and frees the task's resources. A consumer that stops iterating blocks only this task.

        Raises InvalidRequestError if the task cannot run, and UnavailableError if the engine has failed.
        """
        ...

    def load(self) -> EngineLoad: ...

    async def wait_failed(self) -> str:
        """Waits until the engine has failed, and returns a description of the cause.

        The replica's process is then restarted.
        """
        ...

    async def close(self) -> None:
        """Aborts all tasks and frees all resources. May be called more than once."""
