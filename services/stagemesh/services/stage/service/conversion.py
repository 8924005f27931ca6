"""The contract's messages to the runtime's nouns, and back."""

import hashlib
from collections.abc import Iterable

from stagemesh.common import settings
from stagemesh.common.connector_descriptors import descriptors, name_of, number_of
from stagemesh.common.descriptors import Signature
from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.host import host_token
from stagemesh.common.stage_config import StageConfig
from stagemesh.common.tensors import Array, inline_tensor, read_inline, spec_to_wire
from stagemesh.common.versions import WIRE_VERSION
from stagemesh.connectors.edge import ChunkPolicy, FlowUsage, FramesPolicy, StepPolicy, WholePolicy
from stagemesh.services.engines.base import (
    ChatMessage,
    Checkpoint,
    Paused,
    Progress,
    Prompt,
    SamplingOptions,
    Structure,
    Task,
    TokenSelection,
)
from stagemesh.services.engines.media import MediaFile, Part, Samples
from stagemesh.services.stage.replica.load import ReplicaState, StageLoad
from stagemesh.services.stage.step.events import (
    Accepted,
    AudioOutput,
    Content,
    Finished,
    ImageOutput,
    Output,
    StepEvent,
    Tokens,
)
from stagemesh.services.stage.step.spec import InputBinding, InputRebinding, OutputBinding, Rebinding, StepSpec
from stagemesh.v1 import request_pb2, stage_pb2, tensor_pb2

# -- what comes in


def order_from_wire(request: stage_pb2.ExecuteStepRequest) -> StepSpec:
    """The order of a request; raises InvalidRequestError for what has no meaning on its own."""
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
        tensors=_tensors(request.input.tensors),
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
    if message.content and message.parts:
        raise InvalidRequestError(
            "a message holds content and parts; put the content into a part, at its place", reason="INVALID_PROMPT"
        )
    return ChatMessage(message.role, message.content, tuple(map(_part, message.parts)))


def _part(message: request_pb2.Part) -> Part:
    match message.WhichOneof("content"):
        case "text":
            return message.text
        case "image":
            return MediaFile("image", message.image.data, message.image.media_type)
        case "audio":
            return _samples(message.audio)
        case "audio_file":
            return MediaFile("audio", message.audio_file.data, message.audio_file.media_type)
        case "video_file":
            return MediaFile("video", message.video_file.data, message.video_file.media_type)
        case None:
            raise InvalidRequestError("a message holds a part without content; leave it out", reason="INVALID_PROMPT")


def _samples(message: request_pb2.Audio) -> Samples:
    if message.samples.WhichOneof("location") not in {"inline", None}:
        raise InvalidRequestError("samples of a message must be sent inline", reason="INVALID_MEDIA")
    return Samples(read_inline(message.samples), message.sample_rate_hz)


def _tensors(messages: Iterable[tensor_pb2.Tensor]) -> dict[str, Array]:
    tensors: dict[str, Array] = {}
    for message in messages:
        if message.name in tensors:
            raise InvalidRequestError(f"the input holds tensor {message.name!r} twice")
        if message.WhichOneof("location") not in {"inline", None}:
            raise InvalidRequestError(f"input tensor {message.name!r} must be sent inline")
        tensors[message.name] = read_inline(message)
    return tensors


def _sampling(message: request_pb2.Sampling) -> SamplingOptions:
    return SamplingOptions(
        max_tokens=message.max_tokens if message.HasField("max_tokens") else None,
        temperature=message.temperature if message.HasField("temperature") else None,
        top_p=message.top_p if message.HasField("top_p") else None,
        top_k=message.top_k if message.HasField("top_k") else None,
        repetition_penalty=message.repetition_penalty if message.HasField("repetition_penalty") else None,
        stop=tuple(message.stop),
        min_p=message.min_p if message.HasField("min_p") else None,
        presence_penalty=message.presence_penalty if message.HasField("presence_penalty") else None,
        frequency_penalty=message.frequency_penalty if message.HasField("frequency_penalty") else None,
        stop_token_ids=tuple(message.stop_token_ids),
        min_tokens=message.min_tokens,
        ignore_eos=message.ignore_eos,
        bad_words=tuple(message.bad_words),
        logprobs=message.logprobs if message.HasField("logprobs") else None,
        structure=_structure(message),
    )


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
        tensors=_tensors(message.tensors),
        outputs=dict(message.outputs),
        rows=dict(message.rows),
    )


def rebinding_from_wire(request: stage_pb2.RebindStepRequest) -> Rebinding:
    """The rebinding of a request; raises InvalidRequestError for what has no meaning on its own."""
    return Rebinding(
        request_id=request.request_id,
        step_id=request.step_id,
        inputs=tuple(InputRebinding(_input_binding(each.binding), dict(each.first_rows)) for each in request.inputs),
        outputs=tuple(map(_output_binding, request.outputs)),
    )


def _input_binding(message: stage_pb2.InputBinding) -> InputBinding:
    return InputBinding(
        edge=message.edge,
        producer=message.producer,
        transform=message.transform,
        apart=message.apart,
        attempt=message.attempt,
    )


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
                f"edge {message.edge} carries token selection {message.tokens}; this stage knows 1 (all) and 2 (last)",
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


# -- what goes out


def event_to_wire(event: StepEvent) -> stage_pb2.ExecuteStepResponse:
    """The message of an event."""
    if isinstance(event, Output):
        # In place: there is one for every token.
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
    output.name, output.seq = event.name, event.seq
    _set_content(output, event.content)


def _set_content(output: request_pb2.Output, content: Content) -> None:
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
    usage, timings = event.usage, event.timings
    return stage_pb2.StepFinished(
        usage=request_pb2.Usage(
            prompt_tokens=usage.prompt_tokens, output_tokens=usage.output_tokens, steps=usage.steps
        ),
        timings=request_pb2.Timings(
            started_s=timings.started_s, first_output_s=timings.first_output_s, finished_s=timings.finished_s
        ),
        edges=[_edge_usage(each) for each in event.edges],
    )


def _checkpoint_message(event: Checkpoint) -> stage_pb2.Checkpoint:
    return stage_pb2.Checkpoint(
        steps=event.steps,
        token_ids=event.token_ids,
        tensors=[inline_tensor(name, tensor) for name, tensor in event.tensors.items()],
        outputs=event.outputs,
        rows=event.rows,
    )


def _edge_usage(usage: FlowUsage) -> request_pb2.EdgeUsage:
    return request_pb2.EdgeUsage(
        edge=usage.edge, connector=usage.connector, chunks=usage.chunks, size_bytes=usage.size_bytes
    )


def load_to_wire(load: StageLoad) -> stage_pb2.WatchLoadResponse:
    """The message of a load."""
    return stage_pb2.WatchLoadResponse(
        running=load.running,
        queued=load.queued,
        work_s=load.work_s,
        arena_used_bytes=load.arena_used_bytes,
        arena_size_bytes=load.arena_size_bytes,
        credit_bytes=load.credit_bytes,
        free_memory_bytes=load.free_memory_bytes,
        arena_largest_free_bytes=load.arena_largest_free_bytes,
        arena_waiting=load.arena_waiting,
        landing_used_bytes=load.landing_used_bytes,
        landing_size_bytes=load.landing_size_bytes,
    )


def description_to_wire(
    config: StageConfig, signature: Signature, *, state: ReplicaState, detail: str, incarnation: str
) -> stage_pb2.DescribeResponse:
    """A replica's self-portrait."""
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
        connectors=[number_of(card.name) for card in descriptors().values() if not card.missing()],
        wire_version=WIRE_VERSION,
        host=host_token(),
        zone=settings.zone() if config.zone is None else config.zone,
    )
