"""Converts between the messages of StageService and the domain types of a stage."""

import hashlib
from dataclasses import asdict
from typing import Any

from stagemesh.common import settings
from stagemesh.common.connector_descriptors import descriptors, name_of, number_of
from stagemesh.common.descriptors import Signature
from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.host import host_token
from stagemesh.common.request_checks import (
    check_input,
    check_sampling,
    has_prompt,
    read_samples,
    read_tensors,
)
from stagemesh.common.stage_config import StageConfig
from stagemesh.common.tensors import inline_tensor, spec_to_wire
from stagemesh.common.versions import WIRE_VERSION
from stagemesh.connectors.edge import ChunkPolicy, FramesPolicy, StepPolicy, WholePolicy
from stagemesh.services.engines.base import (
    ChatMessage,
    Checkpoint,
    MediaFile,
    Part,
    Paused,
    Progress,
    Prompt,
    Samples,
    SamplingOptions,
    Structure,
    Task,
    TokenSelection,
)
from stagemesh.services.stage.replica.load import ReplicaState, StageLoad
from stagemesh.services.stage.step.events import (
    Accepted,
    AudioOutput,
    Finished,
    ImageOutput,
    Output,
    StepEvent,
    Tokens,
)
from stagemesh.services.stage.step.spec import InputBinding, InputRebinding, OutputBinding, Rebinding, StepSpec
from stagemesh.v1 import request_pb2, stage_pb2

_REPEATED = frozenset({"stop", "stop_token_ids", "bad_words"})


# -- requests


def spec_from_wire(request: stage_pb2.ExecuteStepRequest) -> StepSpec:
    """Converts a request message to a step spec. Raises InvalidRequestError if a value is invalid on any stage."""
    check_input(request.input)
    return StepSpec(
        step_id=request.step_id,
        attempt=request.attempt,
        task=_task(request),
        inputs=tuple(map(_input_binding, request.inputs)),
        outputs=tuple(_output_binding(each) for each in request.outputs),
        streamed=tuple(dict.fromkeys(request.streamed)),
        fingerprint=hashlib.blake2b(request.SerializeToString(deterministic=True), digest_size=16).digest(),
    )


def _task(request: stage_pb2.ExecuteStepRequest) -> Task:
    parameters = request.parameters
    return Task(
        request_id=request.request_id,
        seed=parameters.seed,
        prompt=_prompt(request.input),
        tensors=read_tensors(request.input.tensors),
        sampling=_sampling(parameters.sampling),
        options=dict(parameters.options),
        negative_prompt=request.input.negative_prompt,
        priority=request.priority,
        absent=frozenset(request.absent),
        attempt=request.attempt,
        adapter=parameters.adapter if parameters.HasField("adapter") else None,
        max_steps=request.max_steps if request.HasField("max_steps") else None,
        resume_from=_checkpoint(request.resume_from) if request.HasField("resume_from") else None,
    )


def _prompt(message: request_pb2.Input) -> Prompt | None:
    """Converts the prompt of a request message. Returns None if the prompt is empty."""
    if not has_prompt(message):
        return None
    match message.WhichOneof("prompt"):
        case "text":
            return message.text
        case "conversation":
            return [_message(each) for each in message.conversation.messages]
        case "token_ids":
            return list(message.token_ids.ids)
        case _:
            return None


def _message(message: request_pb2.Message) -> ChatMessage:
    return ChatMessage(message.role, message.content, tuple(map(_part, message.parts)))


def _part(message: request_pb2.Part) -> Part:
    match message.WhichOneof("content"):
        case "text":
            return message.text
        case "image":
            return MediaFile("image", message.image.data, message.image.media_type)
        case "audio":
            return Samples(read_samples(message.audio), message.audio.sample_rate_hz)
        case "audio_file":
            return MediaFile("audio", message.audio_file.data, message.audio_file.media_type)
        case "video_file":
            return MediaFile("video", message.video_file.data, message.video_file.media_type)
        case None:
            raise AssertionError("`check_input` has rejected empty parts")


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
        case "choice":
            return Structure("choice", tuple(message.choice.texts))
        case kind:
            return Structure(kind, (getattr(message, kind),))


def _checkpoint(message: stage_pb2.Checkpoint) -> Checkpoint:
    return Checkpoint(
        steps=message.steps,
        token_ids=tuple(message.token_ids),
        tensors=read_tensors(message.tensors),
        outputs=dict(message.outputs),
        rows=dict(message.rows),
    )


def rebinding_from_wire(request: stage_pb2.RebindStepRequest) -> Rebinding:
    """Converts a request message to a rebinding. Raises InvalidRequestError if a value is invalid on any stage."""
    return Rebinding(
        request_id=request.request_id,
        step_id=request.step_id,
        inputs=tuple(InputRebinding(_input_binding(each.binding), dict(each.first_rows)) for each in request.inputs),
        outputs=tuple(map(_output_binding, request.outputs)),
    )


def _input_binding(message: stage_pb2.InputBinding) -> InputBinding:
    return InputBinding(message.edge, message.producer, message.transform, message.apart, message.attempt)


def _output_binding(message: stage_pb2.OutputBinding) -> OutputBinding:
    return OutputBinding(
        edge=message.edge,
        consumer=message.consumer,
        endpoint=message.endpoint,
        connector=name_of(message.connector),
        policy=_policy(message),
        tensors=frozenset(message.tensors),
        tokens=_token_selection(message),
        attempt=message.attempt,
    )


def _token_selection(message: stage_pb2.OutputBinding) -> TokenSelection:
    match message.tokens:
        case stage_pb2.TOKEN_SELECTION_UNSPECIFIED | stage_pb2.TOKEN_SELECTION_ALL:
            return "all"
        case stage_pb2.TOKEN_SELECTION_LAST:
            return "last"
        case _:
            raise InvalidRequestError(
                f"edge {message.edge} carries token selection {message.tokens}; use 1 (all) or 2 (last)",
                reason="INVALID_EDGE",
            )


def _policy(message: stage_pb2.OutputBinding) -> ChunkPolicy:
    match message.policy.WhichOneof("cut"):
        case "whole":
            return WholePolicy()
        case "frames":
            frames = message.policy.frames
            try:
                return FramesPolicy(frames.frames, frames.initial_frames, frames.left_context_frames)
            except ValueError as exc:
                raise InvalidRequestError(f"edge {message.edge}: {exc}", reason="INVALID_EDGE") from exc
        case _:
            return StepPolicy()


# -- responses


def event_to_wire(event: StepEvent) -> stage_pb2.ExecuteStepResponse:
    """Converts an event of a step to a response message."""
    if isinstance(event, Output):
        # The output is filled in place, because each token has its own output message.
        response = stage_pb2.ExecuteStepResponse()
        _fill(response.output, event)
        return response
    if isinstance(event, Accepted):
        return stage_pb2.ExecuteStepResponse(accepted=stage_pb2.StepAccepted(queue_position=event.queue_position))
    if isinstance(event, Progress):
        progress = stage_pb2.StepProgress(steps=event.steps, total_steps=event.total_steps)
        return stage_pb2.ExecuteStepResponse(progress=progress)
    if isinstance(event, Checkpoint):
        return stage_pb2.ExecuteStepResponse(checkpoint=_checkpoint_message(event))
    if isinstance(event, Paused):
        paused = stage_pb2.StepPaused(checkpoint=_checkpoint_message(event.checkpoint))
        return stage_pb2.ExecuteStepResponse(paused=paused)
    return stage_pb2.ExecuteStepResponse(finished=_finished(event))


def _fill(output: request_pb2.Output, event: Output) -> None:
    output.name, output.seq, content = event.name, event.seq, event.content
    if isinstance(content, str):
        output.text = content
    elif isinstance(content, Tokens):
        output.token_ids.ids.extend(content.ids)
        output.logprobs.extend(
            request_pb2.TokenLogprobs(logprob=each.logprob, top_ids=each.top_ids, top_logprobs=each.top_logprobs)
            for each in content.logprobs
        )
    elif isinstance(content, AudioOutput):
        output.audio.samples.CopyFrom(inline_tensor(output.name, content.samples))
        output.audio.sample_rate_hz = content.sample_rate_hz
    elif isinstance(content, ImageOutput):
        output.image.data, output.image.media_type = content.data, content.media_type
    else:
        output.tensor.CopyFrom(inline_tensor(output.name, content))


def _finished(event: Finished) -> stage_pb2.StepFinished:
    return stage_pb2.StepFinished(
        usage=request_pb2.Usage(**asdict(event.usage)),
        timings=request_pb2.Timings(**asdict(event.timings)),
        edges=[request_pb2.EdgeUsage(**asdict(each)) for each in event.edges],
    )


def _checkpoint_message(event: Checkpoint) -> stage_pb2.Checkpoint:
    return stage_pb2.Checkpoint(
        steps=event.steps,
        token_ids=event.token_ids,
        tensors=[inline_tensor(name, tensor) for name, tensor in event.tensors.items()],
        outputs=event.outputs,
        rows=event.rows,
    )


def load_to_wire(load: StageLoad) -> stage_pb2.WatchLoadResponse:
    """Converts a replica's load to a response message."""
    return stage_pb2.WatchLoadResponse(**asdict(load))


def description_to_wire(
    config: StageConfig, signature: Signature, *, state: ReplicaState, detail: str, incarnation: str
) -> stage_pb2.DescribeResponse:
    """Returns the response message that describes a replica."""
    return stage_pb2.DescribeResponse(
        pipeline=config.pipeline,
        generation=config.generation,
        stage=config.stage,
        replica=config.replica,
        incarnation=incarnation,
        engine=config.engine,
        model=config.model or "",
        state=stage_pb2.ReplicaState.Value(f"REPLICA_STATE_{state.name}"),
        detail=detail,
        accepts=[spec_to_wire(name, spec) for name, spec in signature.accepts.items()],
        emits=[spec_to_wire(name, emitted.spec) for name, emitted in signature.emits.items()],
        connectors=[number_of(each.name) for each in descriptors().values() if not each.missing()],
        wire_version=WIRE_VERSION,
        host=host_token(),
        zone=settings.zone() if config.zone is None else config.zone,
    )
