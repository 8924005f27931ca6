"""Decodes responses to events, and drops events that have arrived before."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import ceil
from typing import Any, TypeVar

import numpy as np
from google.protobuf.message import Message as ProtoMessage

from stagemesh.client.media_transfer import stored_file
from stagemesh.client.responses import (
    Admitted,
    AudioChunk,
    EdgeUsage,
    Event,
    Finished,
    Image,
    MediaChunk,
    OutputFinished,
    Progress,
    Queued,
    Reasoning,
    StageReport,
    StageWarning,
    StoredFile,
    TensorOutput,
    Text,
    Timings,
    TokenCounts,
    TokenLogprob,
    TokenLogprobs,
    Tokens,
    ToolCallPart,
    Usage,
)
from stagemesh.client.retries import RetryPolicy
from stagemesh.common.errors import InternalError, InvalidChunkError
from stagemesh.common.requests.output_position import OutputKey, Position
from stagemesh.common.wire.encoding import enum_word
from stagemesh.common.wire.tensors import read_inline
from stagemesh.common.wire.versions import refuse_unknown
from stagemesh.v1 import chunk_pb2, orchestrator_pb2, request_pb2, stage_pb2

_Described = TypeVar("_Described")


def read_fields(kind: type[_Described], message: ProtoMessage, **fields: Any) -> _Described:
    """Returns an object of the dataclass `kind` that describes a message.

    `fields` contains the values of individual fields by name. Every other field receives the value of the message's
    field of the same name, or None if the message does not have an optional field.
    """
    known = message.DESCRIPTOR.fields_by_name
    for name in kind.__annotations__.keys() & known.keys() - fields.keys():
        fields[name] = None if known[name].has_presence and not message.HasField(name) else getattr(message, name)
    return kind(**fields)


class EventDecoder:
    """Converts the responses of one request to events, in order. Joins the parts of an image."""

    def __init__(self) -> None:
        self._images = defaultdict[OutputKey, bytearray](bytearray)
        """The bytes of the incomplete image of each output."""

    def decode(self, response: orchestrator_pb2.GenerateResponse) -> Iterator[Event]:
        """Yields the events in `response`. Yields nothing if this client may ignore it because it does not know its
        kind.

        Raises UnsupportedError (UNKNOWN_KIND) if this client does not know the kind of the event or of its output, and
        the server has not marked the event as ignorable. Raises InvalidChunkError if the shape, dtype or size of audio
        or of a tensor is inconsistent, and InternalError (OUTPUT_OUT_OF_ORDER) if a part of an image is missing.
        """
        match response.WhichOneof("event"):
            case "admitted":
                admitted = response.admitted
                replicas = tuple(dict(choice.replicas) for choice in admitted.choices)
                yield Admitted(admitted.request_id, admitted.seed, replicas)
            case "queued":
                yield read_fields(Queued, response.queued)
            case "progress":
                yield to_progress(response.progress)
            case "output":
                yield from self._output(response.output, ignorable=response.ignorable)
            case "finished":
                choices = response.finished.choices
                reports = tuple({name: _report(stage) for name, stage in choice.stages.items()} for choice in choices)
                yield Finished(reports, read_fields(Timings, response.finished.timings))
            case None:
                refuse_unknown(response, of="the orchestrator")

    def _output(self, message: request_pb2.Output, *, ignorable: bool) -> Iterator[Event]:
        events: Iterator[Any] = self._content(message, ignorable=ignorable)
        if message.HasField("finish"):
            events = chain(events, [_finish(message)])
        if not message.prompt_tokens:
            return events
        counts = TokenCounts(message.prompt_tokens, message.output_tokens)
        return (replace(event, counts=counts) for event in events)

    def _content(self, message: request_pb2.Output, *, ignorable: bool) -> Iterator[Event]:
        match message.WhichOneof("content"):
            case "text":
                yield Text(message.name, message.text, _read_logprobs(message.logprobs), index=message.index)
            case "message":
                yield from _message(message, ignorable=ignorable)
            case "token_ids":
                yield Tokens(
                    message.name, tuple(message.token_ids.ids), _read_logprobs(message.logprobs), index=message.index
                )
            case "audio":
                yield _audio(message)
            case "image":
                yield from self._image(message)
            case "media" if message.media.data:
                media = message.media
                yield MediaChunk(message.name, media.data, media.media_type, media.offset, index=message.index)
            case "file":
                yield StoredFile(message.name, stored_file(message.file), index=message.index)
            case "tensor":
                yield TensorOutput(message.name, message.tensor.name, read_inline(message.tensor), index=message.index)
            case None if not message.HasField("finish") and not ignorable:
                refuse_unknown(message, of="the orchestrator")
            case _:
                # Nothing but the end of the output.
                pass

    def _image(self, message: request_pb2.Output) -> Iterator[Image]:
        part, data = message.image, self._images[message.name, message.index]
        if not part.offset:
            # A stage that restarted sends its image from the start again.
            data.clear()
        if part.offset != len(data):
            raise InternalError(
                f"an image of output {message.name!r} continues at byte {part.offset}, but {len(data)} were received; "
                "report this as a defect",
                reason="OUTPUT_OUT_OF_ORDER",
            )
        data += part.data
        if part.last:
            yield Image(message.name, bytes(data), part.media_type, part.preview, index=message.index)
            data.clear()


def _finish(message: request_pb2.Output) -> OutputFinished:
    reason = finish_reason(message.finish)
    return read_fields(OutputFinished, message.finish, output=message.name, reason=reason, index=message.index)


def finish_reason(finish: request_pb2.Finish) -> str:
    """Returns the name of the reason why an output or a stage ended, or "unspecified" if it is not known."""
    known = request_pb2.FinishReason.DESCRIPTOR.values_by_number.get(finish.reason)
    return known.name.removeprefix("FINISH_REASON_").lower() if known is not None else "unspecified"


def _message(message: request_pb2.Output, *, ignorable: bool) -> Iterator[Text | Reasoning | ToolCallPart]:
    delta, logprobs, index = message.message, _read_logprobs(message.logprobs), message.index
    match delta.WhichOneof("delta"):
        case "text":
            yield Text(message.name, delta.text, logprobs, index=index)
        case "reasoning":
            yield Reasoning(message.name, delta.reasoning, logprobs, index=index)
        case "tool_call":
            call = delta.tool_call
            yield ToolCallPart(message.name, call.index, call.id, call.name, call.arguments, logprobs, index=index)
        case _ if not ignorable:
            refuse_unknown(delta, of="the orchestrator")
        case _:
            pass


def _audio(message: request_pb2.Output) -> AudioChunk:
    audio = message.audio
    samples = read_inline(audio.samples)
    if samples.dtype != np.float32 or samples.ndim not in (1, 2) or audio.sample_rate_hz < 1:
        raise InvalidChunkError(
            f"output {message.name!r} is {samples.dtype}{list(samples.shape)} at {audio.sample_rate_hz} Hz; audio must "
            "be float32[samples] or float32[samples, channels] at 1 Hz or more; fix the stage that produces it"
        )
    return AudioChunk(message.name, samples.view(np.float32), audio.sample_rate_hz, index=message.index)


def _report(message: stage_pb2.StepFinished) -> StageReport:
    edges = tuple(read_fields(EdgeUsage, each, connector=connector_name(each.connector)) for each in message.edges)
    reason = finish_reason(message.finish) if message.HasField("finish") else None
    warnings = tuple(StageWarning(each.reason, each.message, dict(each.metadata)) for each in message.warnings)
    usage, timings = read_fields(Usage, message.usage), read_fields(Timings, message.timings)
    prompt = _read_logprobs(message.prompt_logprobs)
    return StageReport(usage, timings, edges, reason, warnings, prompt, message.context_tokens)


def to_progress(message: orchestrator_pb2.RequestProgress) -> Progress:
    """Returns the client's description of the progress of a stage."""
    return read_fields(Progress, message.progress, stage=message.stage, index=message.index)


def connector_name(number: int) -> str:
    """Returns the name of a connector. Connectors of other packages have no name here, only a number."""
    word = enum_word(chunk_pb2.Connector.DESCRIPTOR, number)
    return f"connector {word}" if word.isdecimal() else word


def _read_logprobs(messages: Iterable[request_pb2.TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    return tuple(TokenLogprobs(_token(each.sampled), tuple(map(_token, each.top)), each.position) for each in messages)


def _token(message: request_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(message.id, message.text, message.logprob)


_MAX_LINGER_S = 10


class ClientPosition:
    """The client's position in the events of a request.

    Removes repeated events, and builds the request that asks for the remaining events.
    """

    def __init__(self, request: orchestrator_pb2.GenerateRequest, policy: RetryPolicy) -> None:
        self._request = orchestrator_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        self._request.linger_s = min(_MAX_LINGER_S, ceil(policy.reattach_s))
        self._received, self._decoder = Position(), EventDecoder()
        self._steps = Counter[tuple[str, int]]()
        self._admitted = False
        self._generation = ""
        """The generation in which the request runs."""
        self._replicas: Mapping[str, str] = {}
        """The replicas of the request by stage. Empty if it has not been admitted or has several choices."""
        self._admitted_call = 0
        """The number of calls before the one in which the request was admitted."""
        self._is_finished = False

    def request(self) -> orchestrator_pb2.GenerateRequest:
        """Returns the request to send with the next call, which asks for the outputs that are still missing."""
        del self._request.next_positions[:]
        for (name, index), position in self._received.counts.items():
            self._request.next_positions.add(name=name, index=index, position=position)
        if self._received.counts:
            self._request.generation = self._generation
        if self._request.earlier_calls > self._admitted_call and self._replicas:
            self._request.admitted_call = self._admitted_call
            self._request.preferred_replicas.clear()
            self._request.preferred_replicas.update(self._replicas)
        return self._request

    def note_lost(self) -> None:
        """Records that a call ended before its request ended. The call may have started the request."""
        self._request.earlier_calls += 1

    def take(self, response: orchestrator_pb2.GenerateResponse) -> Sequence[Event]:
        """Returns the events in `response` that the caller does not have yet. Empty if their kind is unknown."""
        rest = self.remainder(response)
        return () if rest is None else self.events(rest)

    def remainder(self, response: orchestrator_pb2.GenerateResponse) -> orchestrator_pb2.GenerateResponse | None:
        """Returns `response` without the part of an output that has arrived before. None if nothing remains."""
        if not response.HasField("output"):
            return response
        rest = self._received.remainder(response.output)
        if rest is None or rest is response.output:
            return None if rest is None else response
        return orchestrator_pb2.GenerateResponse(output=rest, ignorable=response.ignorable)

    def events(self, response: orchestrator_pb2.GenerateResponse) -> Sequence[Event]:
        """Returns the events in a response that `remainder` has returned, without those that arrived before."""
        if response.HasField("admitted"):
            self._generation, choices = response.admitted.generation, response.admitted.choices
            self._replicas = dict(choices[0].replicas) if len(choices) == 1 else {}
            self._admitted_call = self._request.earlier_calls
        return tuple(filter(self._is_new, self._decoder.decode(response)))

    def _is_new(self, event: Event) -> bool:
        match event:
            case Queued() | Admitted() if self._admitted:
                # The request is queued or placed again. The caller has already received its start.
                return False
            case Admitted():
                self._admitted = True
                self._request.parameters.seed = event.seed
            case Progress():
                key = event.stage, event.index
                is_new = not self._request.earlier_calls or event.engine_steps > self._steps[key]
                if is_new:
                    self._steps[key] = event.engine_steps
                return is_new
            case Finished():
                # An orchestrator repeats it if the connection broke after it.
                is_new, self._is_finished = not self._is_finished, True
                return is_new
            case _:
                pass
        return True
