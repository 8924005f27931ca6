"""The events of a request, in the order in which they happen, and the result, which contains all outputs.

The `index` of an event is that of the choice to which the event belongs, from 0. The `turn` of an event is that of the
session whose turn the request answers, from 1. It is 0 for a request of `generate`.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt

from stagemesh.client.content import AudioSamples, EncodedMedia, MediaFile, ToolCall
from stagemesh.client.wav import WavWriter
from stagemesh.common.errors import InternalError, NotFoundError
from stagemesh.common.wire.tensors import Array

_SEEDS = 1 << 63


@dataclass(frozen=True, eq=False, kw_only=True)
class RequestEvent:
    """Base class of the events of a request."""

    turn: int = 0


@dataclass(frozen=True)
class Queued(RequestEvent):
    """An event: the request waits for admission. Sent again each time the request's position in the queue changes."""

    request_id: str
    position: int
    """The request's position in the admission queue. The first position is 1."""
    expected_wait_s: float


@dataclass(frozen=True)
class Admitted(RequestEvent):
    """An event: the request has been admitted and assigned to replicas. Only `Queued` events precede it."""

    request_id: str
    seed: int
    """The seed of the first choice. Each further choice has the next seed."""
    choices: tuple[Mapping[str, str], ...]
    """For each choice, the name of the chosen replica of each stage, by stage name."""

    @property
    def replicas(self) -> Mapping[str, str]:
        """The name of the chosen replica of each stage for the first choice, by stage name."""
        return self.choices[0]


@dataclass(frozen=True)
class Progress(RequestEvent):
    """An event: a stage has completed `engine_steps` steps of its engine.

    `total_engine_steps` is None if the stage cannot determine the total number in advance.
    """

    stage: str
    engine_steps: int
    total_engine_steps: int | None
    index: int = 0


class TokenCounts(NamedTuple):
    """The numbers of tokens of the stage that makes an output: in its prompt, and sampled so far."""

    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, eq=False)
class OutputEvent(RequestEvent):
    """Base class of the events of an output. `output` is the name of the output."""

    output: str
    index: int = field(default=0, kw_only=True)
    counts: TokenCounts | None = field(default=None, kw_only=True)
    """The numbers of tokens so far. None unless `count_tokens` was requested."""


@dataclass(frozen=True)
class TokenLogprob:
    """A token of the model's vocabulary, the text that it adds to the output, and its log-probability.

    The token that completes a character has all of it, and the tokens before, which hold parts of it, have no text.
    """

    id: int
    text: str
    logprob: float


@dataclass(frozen=True)
class TokenLogprobs:
    """The log-probability of a generated token, and those of the most probable tokens, the most probable first."""

    sampled: TokenLogprob
    top: tuple[TokenLogprob, ...] = ()
    position: int = 0
    """The position of the token's text in the stage's whole text, in bytes of UTF-8."""


@dataclass(frozen=True)
class Text(OutputEvent):
    """An event with text to append to a text output.

    `logprobs` contains one entry for each token that begins in this text, if the request asked for log-probabilities.
    Otherwise, it is empty.
    """

    delta: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Reasoning(OutputEvent):
    """An event with text to append to the reasoning that precedes the text of an answer, if `parsed` was requested."""

    delta: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class ToolCallPart(OutputEvent):
    """An event with a part of a tool call, if `parsed` was requested. The first part of a call has its whole name.

    The arguments of a call are a JSON object. A required call may be cut off if the output ends with "length" or
    "limit".
    """

    call: int
    """The index of the call within the message, from 0."""
    id: str
    name: str
    """Text to append to the name."""
    arguments: str
    """Text to append to the arguments."""
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True)
class Tokens(OutputEvent):
    """An event with token ids to append to a token output.

    `logprobs` contains one entry for each id if the request asked for log-probabilities. Otherwise, it is empty.
    """

    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, eq=False)
class AudioChunk(AudioSamples, OutputEvent):
    """An event with audio samples to append to an audio output. The samples are read-only."""


@dataclass(frozen=True)
class Image(OutputEvent):
    """An event with a complete encoded image. A preview shows an earlier state of the image that follows it."""

    data: bytes
    media_type: str
    preview: bool = False


@dataclass(frozen=True)
class MediaChunk(OutputEvent):
    """An event with bytes to append to an output that is one encoded audio or video file.

    `offset` is the number of bytes of the file before them.
    """

    data: bytes
    media_type: str
    offset: int


@dataclass(frozen=True)
class StoredFile(OutputEvent):
    """An event with an output, or one image of an output, that a stage has stored in the pipeline's object store."""

    file: MediaFile


@dataclass(frozen=True, eq=False)
class TensorOutput(OutputEvent):
    """An event with a tensor of an output that is not text, tokens, audio or an image. The tensor is read-only."""

    name: str
    tensor: Array


@dataclass(frozen=True)
class OutputFinished(OutputEvent):
    """An event: an output has ended.

    `reason` is "end" if the output is complete, "stop" if `stop_text` or `stop_token_id` stopped it, "length" if it
    reached `max_tokens`, "limit" if it reached a limit of the stage, and "cancelled" or "failed" if it is incomplete.
    It is "empty" if the stage ended without making anything of this output. It is "unspecified" if this client does not
    know the reason.
    """

    reason: str
    stop_text: str | None = None
    stop_token_id: int | None = None


@dataclass(frozen=True)
class Usage:
    """The work of a stage for a request: tokens, engine steps, and the media that the stage produced.

    The cached tokens and the media tokens of the prompt are included in `prompt_tokens`.
    """

    prompt_tokens: int
    output_tokens: int
    engine_steps: int
    cached_tokens: int = 0
    media_tokens: int = 0
    audio_s: float = 0.0
    images: int = 0
    frames: int = 0

    def __add__(self, other: "Usage") -> "Usage":
        """Returns the work of both."""
        return Usage(**{name: getattr(self, name) + getattr(other, name) for name in Usage.__annotations__})


@dataclass(frozen=True)
class Timings:
    """The start, first output and end of a request, in seconds since the server received the request.

    `started_s` is None if no stage accepted the request, and `first_output_s` if there was no output. In a StageReport,
    the times are in seconds since the stage accepted its step, and the step starts with its first input.
    """

    started_s: float | None
    first_output_s: float | None
    finished_s: float


@dataclass(frozen=True)
class EdgeUsage:
    """The connector that an edge used for a request, and the numbers of chunks and bytes that the edge transferred."""

    edge: str
    connector: str
    chunks: int
    size_bytes: int
    handed_over_bytes: int = 0
    """The size of the state for which the edge transferred hand-over tickets, in bytes."""


@dataclass(frozen=True)
class StageWarning:
    """A defect of a stage's results, such as NaN in audio (NON_FINITE_RESULT), or a deviation from the request, such as
    a rounded size (SIZE_ROUNDED).
    """

    reason: str
    """A name of `ErrorReason` in the contract, without its prefix."""
    message: str
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class StageReport:
    """The usage and timings of one stage, and the usage of each edge over which the stage sent data."""

    usage: Usage
    timings: Timings
    edges: tuple[EdgeUsage, ...]
    finish_reason: str | None = None
    """Why the stage ended, as in `OutputFinished`. None if the stage did not finish or does not report it.

    A stage whose producer stopped at its limit ends with "end", so that only the producer's report shows the limit.
    """
    warnings: tuple[StageWarning, ...] = ()
    """Defects of the stage's results that did not fail the request."""
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    """The tokens of the prompt with their log-probabilities, if the request asked for them. Otherwise, it is empty.

    `position` is a token's position in the text of the prompt. The first token has the log-probability 0.
    """
    context_tokens: int = 0
    """The maximum number of tokens in a prompt and its output together. 0 if the stage does not report it."""


@dataclass(frozen=True)
class Finished(RequestEvent):
    """The last event of a request. Contains the reports of the stages that started, and the times of the request.

    If the request failed or was cancelled, the iteration raises the error after this event.
    """

    choices: tuple[Mapping[str, StageReport], ...]
    """For each choice, the report of each stage, by stage name."""
    timings: Timings

    @property
    def stages(self) -> Mapping[str, StageReport]:
        """The report of each stage for the first choice, by stage name."""
        return self.choices[0]

    @property
    def usage(self) -> Mapping[str, Usage]:
        """The work of each stage for all choices together, by stage name."""
        total = dict[str, Usage]()
        for name, report in chain.from_iterable(stages.items() for stages in self.choices):
            total[name] = total[name] + report.usage if name in total else report.usage
        return total

    @property
    def edges(self) -> tuple[EdgeUsage, ...]:
        """The usage of all edges for each choice, as reported by the stages that sent data over them."""
        return tuple(edge for stages in self.choices for stage in stages.values() for edge in stage.edges)


Event: TypeAlias = (
    Queued
    | Admitted
    | Progress
    | Text
    | Reasoning
    | ToolCallPart
    | Tokens
    | AudioChunk
    | Image
    | MediaChunk
    | StoredFile
    | TensorOutput
    | OutputFinished
    | Finished
)

StartOrEnd = TypeVar("StartOrEnd", Admitted, Finished)
OutputEventT = TypeVar("OutputEventT", bound=OutputEvent)


class Audio(AudioSamples):
    """A complete audio output."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Choice:
    """All outputs of one choice of a request, by output name."""

    seed: int
    texts: Mapping[str, str]
    tokens: Mapping[str, tuple[int, ...]]
    logprobs: Mapping[str, tuple[TokenLogprobs, ...]]
    """The log-probabilities of the tokens, by the name of their output of text or tokens. Empty if the request did not
    ask for log-probabilities.
    """
    audios: Mapping[str, Audio]
    images: Mapping[str, tuple[Image, ...]]
    """The images of each output, without previews."""
    media: Mapping[str, EncodedMedia]
    """The outputs that are one encoded audio or video file each."""
    files: Mapping[str, tuple[MediaFile, ...]]
    """The stored files of each output."""
    tensors: Mapping[str, tuple[TensorOutput, ...]]
    finishes: Mapping[str, OutputFinished]
    """Why each output ended."""
    reasonings: Mapping[str, str] = field(default_factory=dict[str, str])
    """The reasoning that preceded each text output, if `parsed` was requested."""
    tool_calls: Mapping[str, tuple[ToolCall, ...]] = field(default_factory=dict[str, tuple[ToolCall, ...]])
    """The tool calls of each text output, if `parsed` was requested. Their arguments are JSON texts."""

    @property
    def text(self) -> str:
        """The concatenated text of all text outputs, or an empty text without text outputs."""
        return "".join(self.texts.values())

    @property
    def audio(self) -> npt.NDArray[np.float32]:
        """The samples of the first audio output, or an empty array without audio outputs."""
        return next((audio.samples for audio in self.audios.values()), np.empty(0, np.float32))

    @property
    def sample_rate_hz(self) -> int:
        """The sample rate of the first audio output in hertz, or 0 without audio outputs."""
        return next((audio.sample_rate_hz for audio in self.audios.values()), 0)

    def save_wav(self, path: Path | str) -> None:
        """Writes the first audio output to a WAV file as 16-bit PCM.

        Raises NotFoundError if the request has not produced audio.
        """
        if not self.audios:
            raise NotFoundError("the request produced no audio to save; request an audio output", reason="NO_AUDIO")
        with WavWriter(path) as writer:
            writer.write(self.audio, sample_rate_hz=self.sample_rate_hz)


@dataclass(frozen=True, eq=False, kw_only=True)
class Result(Choice):
    """All outputs of a request: those of the first choice, and in `choices` those of every choice.

    `first_text_s`, `first_audio_s` and `first_image_s` are the times of the first text, audio and image of any choice,
    in seconds since the call. Each of them is None if the request produced no such output.
    """

    request_id: str
    choices: tuple[Choice, ...]
    finished: Finished
    first_text_s: float | None
    first_audio_s: float | None
    first_image_s: float | None
    total_s: float


class ResultBuilder:
    """A collector of the events of a request, which builds the Result.

    The times in the Result are in seconds since the ResultBuilder was constructed.
    """

    def __init__(self) -> None:
        self._begun_s = time.monotonic()
        self._events: list[Event] = []
        self._first_s: dict[type[Event], float] = {}
        """The time of the first event of each type, in seconds since the ResultBuilder was constructed."""

    def add(self, event: Event) -> None:
        """Adds an event. The events must be added in the order in which they arrived."""
        if not isinstance(event, Queued | Progress) and not (isinstance(event, Image) and event.preview):
            self._events.append(event)
        self._first_s.setdefault(type(event), self._now_s())

    def build(self) -> Result:
        """Returns the result. Raises InternalError if the `Admitted` or `Finished` event is missing."""
        admitted, finished = self._last(Admitted), self._last(Finished)
        if admitted is None or finished is None:
            raise InternalError("the server ended the stream without a `finished` event; report this as a defect")
        seeds = [(admitted.seed + index) % _SEEDS for index in range(len(admitted.choices))]
        choices = tuple(self._choice(index, seed=seed) for index, seed in enumerate(seeds))
        return Result(
            **vars(choices[0]),
            request_id=admitted.request_id,
            choices=choices,
            finished=finished,
            first_text_s=self._first_s.get(Text),
            first_audio_s=self._first_s.get(AudioChunk),
            first_image_s=self._first_s.get(Image),
            total_s=self._now_s(),
        )

    def _choice(self, index: int, *, seed: int) -> Choice:
        by_output = partial(self._by_output, index=index)
        tokens = by_output(Tokens)
        return Choice(
            seed=seed,
            texts={output: "".join(each.delta for each in made) for output, made in by_output(Text).items()},
            tokens={output: tuple(chain.from_iterable(each.ids for each in made)) for output, made in tokens.items()},
            logprobs={output: found for output, made in by_output(OutputEvent).items() if (found := _logprobs(made))},
            audios={output: _join(chunks) for output, chunks in by_output(AudioChunk).items()},
            images={output: tuple(images) for output, images in by_output(Image).items()},
            media={output: _join_media(chunks) for output, chunks in by_output(MediaChunk).items()},
            files={output: tuple(each.file for each in made) for output, made in by_output(StoredFile).items()},
            tensors={output: tuple(tensors) for output, tensors in by_output(TensorOutput).items()},
            finishes={output: ends[-1] for output, ends in by_output(OutputFinished).items()},
            reasonings={output: "".join(part.delta for part in made) for output, made in by_output(Reasoning).items()},
            tool_calls={output: join_calls(parts) for output, parts in by_output(ToolCallPart).items()},
        )

    def _last(self, kind: type[StartOrEnd]) -> StartOrEnd | None:
        return next((event for event in reversed(self._events) if isinstance(event, kind)), None)

    def _by_output(self, kind: type[OutputEventT], *, index: int) -> Mapping[str, Sequence[OutputEventT]]:
        """Returns the events of the type `kind` of one choice in order of arrival, by output name."""
        events = defaultdict[str, list[OutputEventT]](list)
        for event in self._events:
            if isinstance(event, kind) and event.index == index:
                events[event.output].append(event)
        return events

    def _now_s(self) -> float:
        return time.monotonic() - self._begun_s


def join_calls(parts: Iterable[ToolCallPart]) -> tuple[ToolCall, ...]:
    """Returns the tool calls that the parts of one message form, in order. Their arguments are JSON texts."""
    calls = defaultdict[int, list[ToolCallPart]](list)
    for part in parts:
        calls[part.call].append(part)
    return tuple(
        ToolCall(made[0].id, "".join(part.name for part in made), "".join(part.arguments for part in made))
        for made in calls.values()
    )


def _logprobs(made: Sequence[OutputEvent]) -> tuple[TokenLogprobs, ...]:
    scored = (each for each in made if isinstance(each, Text | Reasoning | ToolCallPart | Tokens))
    return tuple(chain.from_iterable(each.logprobs for each in scored))


def _join(chunks: Sequence[AudioChunk]) -> Audio:
    return Audio(np.concatenate([chunk.samples for chunk in chunks]), chunks[0].sample_rate_hz)


def _join_media(chunks: Sequence[MediaChunk]) -> EncodedMedia:
    return EncodedMedia(b"".join(chunk.data for chunk in chunks), chunks[0].media_type)
