"""The spec of a step: the content of an ExecuteStep or RebindStep request, and its conversion from and to messages."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.media.decoding import MediaKind
from stagemesh.common.plugins.connectors import ConnectorName, name_of
from stagemesh.common.plugins.descriptors import Signature
from stagemesh.common.requests.request_checks import (
    check_input,
    check_known,
    check_sampling,
    has_prompt,
    read_json_object,
    read_options,
    read_samples,
    read_tensors,
)
from stagemesh.common.wire.chunk_sizes import ChunkPolicy, FramesPolicy, PlayoutPace, StepPolicy, WholePolicy
from stagemesh.common.wire.encoding import digest_of, to_message, without_fields
from stagemesh.common.wire.telemetry import StepTrace
from stagemesh.common.wire.tensors import inline_tensor
from stagemesh.common.wire.versions import refuse_unknown
from stagemesh.connectors.packets import ConsumerAddress, Packet
from stagemesh.services.engines.base import Checkpoint, SamplingOptions, Structure, Task, TokenSelection
from stagemesh.services.engines.prompts import (
    ChatMessage,
    Conversation,
    MediaFile,
    Medium,
    Part,
    Prompt,
    RawPrompt,
    Role,
    Samples,
    Tool,
    ToolCall,
)
from stagemesh.v1 import request_pb2, stage_pb2

_ROLES: Mapping[int, Role] = {
    request_pb2.ROLE_SYSTEM: "system",
    request_pb2.ROLE_DEVELOPER: "developer",
    request_pb2.ROLE_USER: "user",
    request_pb2.ROLE_ASSISTANT: "assistant",
    request_pb2.ROLE_TOOL: "tool",
}
_REPEATED = frozenset({"stop", "stop_token_ids", "bad_words"})
_TOKEN_SELECTIONS: Mapping[int, TokenSelection] = {
    stage_pb2.TOKEN_SELECTION_UNSPECIFIED: "all",
    stage_pb2.TOKEN_SELECTION_ALL: "all",
    stage_pb2.TOKEN_SELECTION_LAST: "last",
}

_MAX_COUNT = 1 << 53
STATE_EDGE = "@state"
"""The name of the edge that transfers a paused request's state to the replica that resumes the request. The edge does
not belong to the pipeline."""


@dataclass(frozen=True)
class InputBinding:
    """An incoming edge of a step and the producer replica to which it is bound."""

    edge: str
    peer: str
    """The name of the producer replica."""
    transform: str = ""
    """The name of the transform that is applied to the packets. Empty if the packets are not transformed."""
    apart: bool = False
    """Whether each packet of this edge is a separate input. If False, the packets are joined with the packets of other
    edges."""
    attempt: int = 1
    """The attempt to which the edge's flow belongs."""
    first_rows: Mapping[str, int] = field(default_factory=dict[str, int])
    """The number of rows that precede the first row of the new flow, by tensor name. 0 for tensors that are not listed.
    Only used when an edge is bound to another producer."""

    @property
    def content(self) -> Mapping[str, object]:
        """The fields that a rebinding cannot change."""
        return {"transform": self.transform, "apart": self.apart}


@dataclass(frozen=True)
class OutputBinding:
    """An outgoing edge of a step and the consumer replica to which it is bound."""

    edge: str
    peer: ConsumerAddress
    """The consumer replica."""
    connector: ConnectorName
    policy: ChunkPolicy
    tensors: frozenset[str] = frozenset()
    """The names of the emitted tensors that the edge transfers. Empty means all emitted tensors."""
    tokens: TokenSelection = "all"
    attempt: int = 1
    """The attempt to which the edge's flow belongs."""
    transform: str = ""
    """The name of the transform that is applied to the selected part of each packet. Empty if there is none."""

    @property
    def content(self) -> Mapping[str, object]:
        """The fields that a rebinding cannot change."""
        return {"transform": self.transform, "tensors": sorted(self.tensors), "tokens": self.tokens}

    @property
    def is_selective(self) -> bool:
        """Whether the edge may omit tensors or rows of a packet."""
        return bool(self.tensors) or self.tokens == "last"

    def select(self, packet: Packet) -> Packet | None:
        """Returns a packet with only the tensors, tickets and rows that the edge transfers, or None if it transfers
        none of them.
        """
        names = self.tensors
        if names and not (packet.tensors.keys() <= names and packet.tickets.keys() <= names):
            tensors = {name: tensor for name, tensor in packet.tensors.items() if name in names}
            tickets = {name: ticket for name, ticket in packet.tickets.items() if name in names}
            if not tensors and not tickets:
                return None
            packet = Packet(tensors, packet.metadata, tickets)
        return _from_last_prompt_token(packet) if self.tokens == "last" else packet


@dataclass(frozen=True)
class StreamedOutput:
    """An emitted tensor that the caller receives, as described by `StreamedOutput` in stage.proto."""

    tensor: str
    media_type: str = ""
    """The media type in which the stage encodes the tensor. Empty if it is not encoded."""
    frame_rate: float | None = None
    """Frames per second of a video. None for any other output."""
    uri: str = ""
    """The object in which the stage stores the output. Empty if the output is sent."""
    parsed: bool = False
    """Whether a text may be sent as a message."""

    @property
    def is_file(self) -> bool:
        """Whether the stage encodes or stores the output."""
        return bool(self.media_type or self.uri)


@dataclass(frozen=True)
class StepSpec:
    """The spec of one stage's part of a request, as requested by an ExecuteStep call."""

    step_id: str
    attempt: int
    task: Task
    """The engine's task. Its inlets are empty until the run opens them."""
    inputs: tuple[InputBinding, ...] = ()
    outputs: tuple[OutputBinding, ...] = ()
    streamed: tuple[StreamedOutput, ...] = ()
    """The emitted tensors that the caller receives."""
    fingerprint: bytes = b""
    """A digest of the ExecuteStep request. Requests with equal content have equal fingerprints."""
    trace: StepTrace | None = None
    """The spans of the step, or None if it is not traced."""
    attach_only: bool = False
    """Whether the call must not start the step, because it has been started already."""
    lowest_attempt: int = 0
    """The lowest attempt in which the edges of the step may be rebound from now on."""

    @property
    def takes_state(self) -> bool:
        """Whether the state from which the step resumes arrives over an edge."""
        return any(binding.edge == STATE_EDGE for binding in self.inputs)

    @property
    def request_id(self) -> str:
        return self.task.request_id

    @property
    def makes_files(self) -> bool:
        """Whether the step encodes or stores an output. Such a step restarts from its start rather than resume."""
        return any(output.is_file for output in self.streamed)

    @property
    def streamed_tensors(self) -> frozenset[str]:
        """The names of the tensors that the caller receives."""
        return frozenset(output.tensor for output in self.streamed)

    @property
    def wanted_tensors(self) -> frozenset[str] | None:
        """The names of the tensors that at least one edge or the caller requests. None means all tensors."""
        sent = self.sent_tensors
        return None if sent is None else self.streamed_tensors | sent

    @property
    def sent_tensors(self) -> frozenset[str] | None:
        """The names of the tensors and tickets that at least one edge requests. None means all of them."""
        if any(not binding.tensors for binding in self.outputs):
            return None
        return frozenset[str]().union(*(binding.tensors for binding in self.outputs))

    def wanted_rows(self, signature: Signature) -> TokenSelection:
        """Returns "last" if the engine needs to emit only the rows of the last tokens, otherwise "all".

        The result is "last" if all edges request only these rows and the caller requests no tensor with rows. A caller
        always receives all rows of a tensor.
        """
        only_last = self._rows_of_edges(signature) == {"last"}
        return "last" if only_last and not _tensors_with_rows(signature) & self.streamed_tensors else "all"

    def edges_take_all_rows(self, signature: Signature) -> bool:
        """Returns whether every edge transfers all emitted rows of its tensors.

        If so, one row count applies to all edges.
        """
        return self._rows_of_edges(signature) <= {self.wanted_rows(signature)}

    def _rows_of_edges(self, signature: Signature) -> set[TokenSelection]:
        names = _tensors_with_rows(signature)
        return {each.tokens for each in self.outputs if not each.tensors or each.tensors & names}


@dataclass(frozen=True)
class Rebinding:
    """New peer replicas for some of the edges of a step, as requested by a RebindStep call."""

    request_id: str
    step_id: str
    inputs: tuple[InputBinding, ...] = ()
    outputs: tuple[OutputBinding, ...] = ()


def _tensors_with_rows(signature: Signature) -> set[str]:
    return {name for name, each in signature.emits.items() if each.kind == "tensor" and not each.spec.ticket_kind}


def _from_last_prompt_token(packet: Packet) -> Packet | None:
    """Returns a packet with the rows from the prompt's last token onwards, or None if all rows are earlier.

    Returns the unchanged packet if its metadata does not contain the token positions.
    """
    start, prompt_tokens = packet.metadata.get("token_start"), packet.metadata.get("prompt_tokens")
    if not isinstance(start, int) or not isinstance(prompt_tokens, int):
        return packet
    skipped = prompt_tokens - 1 - start
    if skipped <= 0 or not packet.tensors:
        return packet
    tensors = {name: tensor[skipped:] for name, tensor in packet.tensors.items()}
    left = len(next(iter(tensors.values())))
    if not left and not packet.tickets:
        return None
    return Packet(tensors, {**packet.metadata, "token_start": start + skipped}, packet.tickets)


# -- conversion from messages


def spec_from_wire(request: stage_pb2.ExecuteStepRequest) -> StepSpec:
    """Converts an ExecuteStep request to a step spec.

    Raises InvalidRequestError if a value is invalid regardless of the stage, and UnsupportedError (UNKNOWN_KIND) if the
    input or the parameters need a later version.
    """
    check_input(request.input)
    check_known(request.parameters)
    return StepSpec(
        step_id=request.step_id,
        attempt=request.attempt,
        task=_task(request),
        inputs=tuple(map(_input_binding, request.inputs)),
        outputs=tuple(_output_binding(each) for each in request.outputs),
        streamed=tuple(
            StreamedOutput(
                each.tensor,
                each.media_type,
                each.frame_rate if each.HasField("frame_rate") else None,
                each.uri,
                each.parsed,
            )
            for each in request.streamed
        ),
        fingerprint=_fingerprint(request),
        trace=StepTrace.of(request.traceparent),
        attach_only=request.attach_only,
        lowest_attempt=request.lowest_attempt,
    )


def _fingerprint(request: stage_pb2.ExecuteStepRequest) -> bytes:
    """Returns a digest of the request without what calls of the same step need not share.

    These are the trace context, `attach_only`, `lowest_attempt`, the addresses of consumers, which may have restarted
    elsewhere, and what an orchestrator measures or negotiates: the connectors of edges and the pace in their chunk
    policies. A call that attaches to a running step does not change them.
    """
    content = without_fields(request, "traceparent", "attach_only", "lowest_attempt")
    for output in content.outputs:
        for name in ("connector", "endpoint", "server_name"):
            output.ClearField(name)
        if output.policy.HasField("frames"):
            output.policy.frames.ClearField("pace")
    return digest_of(content)


def _task(request: stage_pb2.ExecuteStepRequest) -> Task:
    parameters = request.parameters
    return Task(
        request_id=request.request_id,
        seed=request.seed,
        prompt=_prompt(request.input),
        tensors=read_tensors(request.input.tensors),
        sampling=_sampling(parameters.sampling),
        options=read_options(parameters.options),
        negative_prompt=request.input.negative_prompt or ("" if request.input.empty_negative_prompt else None),
        priority=request.priority,
        absent=frozenset(request.absent),
        attempt=request.attempt,
        adapter=parameters.adapter or None,
        parsed=any(each.parsed for each in request.streamed),
        max_steps=request.max_engine_steps if request.HasField("max_engine_steps") else None,
        resume_from=_checkpoint(request.resume_from) if request.HasField("resume_from") else None,
    )


def _prompt(message: request_pb2.Input) -> Prompt | None:
    """Converts the prompt of an ExecuteStep request. Returns None if the prompt is empty."""
    if not has_prompt(message):
        return None
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "conversation":
            return _conversation(message.conversation)
        case "token_ids":
            return RawPrompt(tuple(message.token_ids.ids), tuple(map(_medium, message.media)))
        case "raw_text":
            return RawPrompt(message.raw_text, tuple(map(_medium, message.media)))
        case _:
            return None


def _conversation(message: request_pb2.Conversation) -> Conversation:
    calls, messages = dict[str, ToolCall](), list[ChatMessage]()
    for each in message.messages:
        made = [ToolCall(call.id, call.name, read_json_object(call.arguments, "arguments")) for call in each.tool_calls]
        parts, result_of = tuple(map(_part, each.parts)), calls.get(each.tool_call_id)
        messages.append(
            ChatMessage(_ROLES[each.role], each.content, parts, tuple(made), result_of, each.reasoning, each.name)
        )
        calls |= {call.id: call for call in made}
    return Conversation(
        tuple(messages),
        tools=tuple(
            Tool(each.name, each.description, read_json_object(each.parameters, "parameters"), each.strict)
            for each in message.tools
        ),
        template_arguments=read_json_object(message.template_arguments, "template_arguments"),
        tool_choice=message.tool_choice,
    )


def _part(message: request_pb2.Part) -> Part:
    return message.text if message.WhichOneof("content") == "text" else _medium(message)


def _medium(message: request_pb2.Part) -> Medium:
    match message.WhichOneof("content"):
        case "image":
            return _media_file("image", message.image)
        case "audio":
            return Samples(read_samples(message.audio), message.audio.sample_rate_hz)
        case "audio_file":
            return _media_file("audio", message.audio_file)
        case "video_file":
            return _media_file("video", message.video_file, use_audio=message.use_audio_in_video)
        case other:
            raise AssertionError(f"`check_input` has rejected parts with {other}")


def _media_file(kind: MediaKind, file: request_pb2.MediaFile, *, use_audio: bool = False) -> MediaFile:
    reference = file if file.WhichOneof("content") == "uri" else None
    return MediaFile(kind, file.data, file.media_type, use_audio=use_audio, reference=reference)


def _sampling(message: request_pb2.Sampling) -> SamplingOptions:
    check_sampling(message)
    fields: dict[str, Any] = {
        field.name: tuple(value) if field.name in _REPEATED else value
        for field, value in message.ListFields()
        if field.containing_oneof is None or field.containing_oneof.name != "structure"
    }
    return SamplingOptions(**fields, structure=_structure(message))


def _structure(message: request_pb2.Sampling) -> Structure | None:
    match message.WhichOneof("structure"):
        case None:
            return None
        case "allowed_texts":
            return Structure("allowed_texts", tuple(message.allowed_texts.texts))
        case kind:
            return Structure(kind, (getattr(message, kind),))


def _checkpoint(message: stage_pb2.Checkpoint) -> Checkpoint:
    if max(message.engine_steps, 0, *message.outputs.values(), *message.rows.values()) > _MAX_COUNT:
        raise InvalidRequestError("a count in the checkpoint is above 2^53", reason="INVALID_CHECKPOINT")
    return Checkpoint(
        steps=message.engine_steps,
        token_ids=tuple(message.token_ids),
        tensors=read_tensors(message.tensors),
        outputs=dict(message.outputs),
        rows=dict(message.rows),
    )


def rebinding_from_wire(request: stage_pb2.RebindStepRequest) -> Rebinding:
    """Converts a RebindStep request to a rebinding. Raises InvalidRequestError if a value is invalid regardless of the
    stage.
    """
    return Rebinding(
        request_id=request.request_id,
        step_id=request.step_id,
        inputs=tuple(
            replace(_input_binding(each.binding), first_rows=dict(each.first_rows)) for each in request.inputs
        ),
        outputs=tuple(map(_output_binding, request.outputs)),
    )


def _input_binding(message: stage_pb2.InputBinding) -> InputBinding:
    return InputBinding(message.edge, message.producer, message.transform, message.apart, message.attempt)


def _output_binding(message: stage_pb2.OutputBinding) -> OutputBinding:
    return OutputBinding(
        edge=message.edge,
        peer=ConsumerAddress(message.consumer, message.endpoint, message.server_name),
        connector=name_of(message.connector),
        policy=_policy(message),
        tensors=frozenset(message.tensors),
        tokens=_token_selection(message),
        attempt=message.attempt,
        transform=message.transform,
    )


def _token_selection(message: stage_pb2.OutputBinding) -> TokenSelection:
    if message.tokens not in _TOKEN_SELECTIONS:
        raise InvalidRequestError(
            f"edge {message.edge} carries token selection {message.tokens}; use 1 (all) or 2 (last)",
            reason="INVALID_EDGE",
        )
    return _TOKEN_SELECTIONS[message.tokens]


def _policy(message: stage_pb2.OutputBinding) -> ChunkPolicy:
    match message.policy.WhichOneof("cut"):
        case "whole":
            return WholePolicy()
        case "frames":
            frames = message.policy.frames
            try:
                return FramesPolicy(frames.frames, tuple(frames.ramp), frames.left_context_frames, _pace(frames))
            except ValueError as exc:
                raise InvalidRequestError(f"edge {message.edge}: {exc}", reason="INVALID_EDGE") from exc
        case _:
            refuse_unknown(message.policy, of="the caller")
            return StepPolicy()


def _pace(message: stage_pb2.FramesPolicy) -> PlayoutPace | None:
    if not message.HasField("pace"):
        return None
    pace = message.pace
    costs_s = {cost.frames: cost.seconds for cost in pace.call_costs}
    return PlayoutPace(pace.frame_interval_s, pace.frame_audio_s, costs_s, pace.reserve_s)


def checkpoint_to_wire(state: Checkpoint) -> stage_pb2.Checkpoint:
    """Converts a checkpoint to its protobuf message, including the tensors."""
    tensors = [inline_tensor(name, tensor) for name, tensor in state.tensors.items()]
    return to_message(stage_pb2.Checkpoint, state, tensors=tensors, engine_steps=state.steps)
