"""Validation of a step against the stage's signature, before the replica reserves any resource for the step."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

from stagemesh.common.descriptors import Emitted, Signature
from stagemesh.common.encodings import MAX_FRAME_RATE, VIDEO_ENCODINGS, encodings_of
from stagemesh.common.errors import InvalidRequestError, NotReadyError, UnsupportedError
from stagemesh.common.request_checks import check_choice_id, check_options, empty_prompt_error
from stagemesh.services.engines.abilities import EngineAbilities, HandsOver
from stagemesh.services.engines.base import MEDIA_TYPES, MediaFile, Medium, Samples, SamplingOptions, Task, media_of
from stagemesh.services.stage.step.spec import STATE_EDGE, OutputBinding, Rebinding, StepSpec, StreamedOutput

# An orchestrator builds the id from request, stage and attempt.
_STEP_ID = re.compile(r"[A-Za-z0-9._:/-]{1,256}")
_SAMPLE_RATES_HZ = range(1_000, 384_001)


def check_spec(spec: StepSpec, signature: Signature, *, engine: str, abilities: EngineAbilities) -> None:
    """Raises InvalidRequestError or UnsupportedError if the spec of a step is not valid for the stage.

    The error names the invalid value and the allowed values. `engine` is the name of the stage's engine.
    """
    check_choice_id(spec.request_id)
    if not _STEP_ID.fullmatch(spec.step_id):
        raise InvalidRequestError(
            f"step_id is {spec.step_id[:270]!r}; use 1 to 256 letters, digits, '.', '_', ':', '-' and '/'",
            reason="INVALID_ID",
        )
    if spec.attempt < 1:
        raise InvalidRequestError("attempt is 0; attempts count from 1")
    _check_abilities(spec.task, signature, abilities, engine=engine)
    _check_pause(spec)
    if (state := spec.task.resume_from) is not None:
        counted = {**state.outputs, **state.rows}
        _check_emitted(counted, signature, problem="the checkpoint counts", reason="INVALID_CHECKPOINT")
    _check_edges(spec, signature)
    _check_absent(spec.task.absent, signature)
    _check_streamed(spec, signature)
    check_options(spec.task.options, signature.options, owner="this stage")
    if not signature.accepts:
        _check_prompt(spec.task, signature, engine=engine)


def check_handover(signature: Signature, abilities: EngineAbilities, *, engine: str) -> None:
    """Raises NotReadyError (HANDOVER_UNAVAILABLE) if the engine cannot hand over state as the signature says.

    Call it after the engine has started. `engine` is the engine's name.
    """
    able = abilities.hands_over or HandsOver()
    lacking = {
        "offer": signature.emitted_kinds - able.offers,
        "accept": signature.accepted_kinds - able.accepts,
    }
    for verb, kinds in lacking.items():
        if kinds:
            raise NotReadyError(
                f"engine {engine} cannot {verb} state of kind {', '.join(sorted(kinds))}, which the stage's signature "
                "names; check the options of the engine's transport",
                reason="HANDOVER_UNAVAILABLE",
            )


def check_rebinding(rebinding: Rebinding) -> None:
    """Raises InvalidRequestError if a rebinding is not valid. The error names the invalid value."""
    check_choice_id(rebinding.request_id)
    _check_edge_names("inputs", [each.edge for each in rebinding.inputs])
    _check_edge_names("outputs", [each.edge for each in rebinding.outputs])
    _check_consumers(rebinding.outputs)
    for binding in rebinding.inputs:
        if not binding.producer:
            raise InvalidRequestError(f"edge {binding.edge} needs a producer", reason="INVALID_EDGE")


def _check_pause(spec: StepSpec) -> None:
    if spec.task.max_steps is None:
        if any(binding.edge == STATE_EDGE for binding in spec.outputs):
            raise InvalidRequestError(f"edge {STATE_EDGE} carries the state of a pause; set max_steps with it")
        return
    if not spec.task.max_steps:
        raise InvalidRequestError("max_steps is 0; set it to at least 1, or leave it unset")
    for binding in spec.outputs:
        if binding.edge == STATE_EDGE:
            continue
        raise InvalidRequestError(
            f"max_steps is set together with the outgoing edge {binding.edge}; bind outgoing edges to the step that "
            "runs to its end, without max_steps",
            reason="INVALID_EDGE",
        )


def _check_abilities(task: Task, signature: Signature, abilities: EngineAbilities, *, engine: str) -> None:
    if task.max_steps is not None and not abilities.can_pause:
        raise _unsupported(engine, "cannot pause; leave max_steps unset to run the step to its end")
    if task.resume_from is not None and not abilities.can_resume:
        raise _unsupported(engine, "cannot resume; leave resume_from unset to run the step from its start")
    if task.sampling != SamplingOptions() and not signature.sampling:
        raise _unsupported(engine, "does not choose tokens on this stage; leave sampling unset", ability="sampling")
    if task.adapter is not None and not signature.adapters:
        raise _unsupported(
            engine,
            "accepts no adapters on this stage; leave adapter unset, or start the stage with the option enable_lora if "
            "the engine has that option",
            ability="adapters",
        )


def _unsupported(engine: str, problem: str, **ability: str) -> UnsupportedError:
    return UnsupportedError(f"engine {engine} {problem}", metadata={"engine": engine, **ability})


def _check_edges(spec: StepSpec, signature: Signature) -> None:
    _check_edge_names("inputs", [binding.edge for binding in spec.inputs])
    _check_edge_names("outputs", [binding.edge for binding in spec.outputs])
    _check_consumers(spec.outputs)
    for binding in spec.outputs:
        _check_emitted(binding.tensors, signature)
    if spec.task.resume_from is None and spec.takes_state:
        raise InvalidRequestError(f"edge {STATE_EDGE} carries a state to resume from; set resume_from to its steps")
    if any(binding.edge != STATE_EDGE for binding in spec.inputs) and not signature.accepts:
        bound = ", ".join(binding.edge for binding in spec.inputs)
        raise InvalidRequestError(f"this stage accepts the prompt but no edge; unbind {bound}", reason="INVALID_EDGE")
    is_unfed = signature.accepts and not spec.inputs and spec.task.resume_from is None
    if is_unfed and not signature.needs_text_alone:
        raise InvalidRequestError(
            f"no edge feeds this stage; bind an edge that carries {', '.join(signature.accepts)}",
            reason="MISSING_INPUT",
        )


def _check_edge_names(direction: str, edges: Sequence[str]) -> None:
    for edge, count in Counter(edges).items():
        if not edge or count > 1:
            problem = f"{edge!r} twice" if edge else "without a name"
            raise InvalidRequestError(f"{direction} contain an edge {problem}", reason="INVALID_EDGE")


def _check_consumers(bindings: Iterable[OutputBinding]) -> None:
    for binding in bindings:
        if not binding.consumer or not binding.endpoint:
            raise InvalidRequestError(f"edge {binding.edge} needs a consumer and an endpoint", reason="INVALID_EDGE")


def _check_absent(absent: Iterable[str], signature: Signature) -> None:
    missing = sorted(set(absent) & signature.accepts.keys() - signature.optional)
    if missing:
        raise InvalidRequestError(
            f"no edge carries {', '.join(missing)}, which this stage requires; bind an edge that does",
            reason="MISSING_INPUT",
        )


def _check_emitted(
    names: Iterable[str], signature: Signature, *, problem: str = "unknown tensor", reason: str = "UNKNOWN_TENSOR"
) -> None:
    for name in names:
        if name not in signature.emits:
            raise InvalidRequestError(
                f"{problem} {name!r}; this stage emits {', '.join(signature.emits) or 'none'}", reason=reason
            )


def _check_streamed(spec: StepSpec, signature: Signature) -> None:
    _check_emitted(spec.streamed_tensors, signature)
    if len(spec.streamed_tensors) < len(spec.streamed):
        raise InvalidRequestError("streamed names a tensor twice; name each tensor once")
    for output in spec.streamed:
        _check_file(output, signature.emits[output.tensor])
    if spec.makes_files and (spec.task.max_steps is not None or spec.task.resume_from is not None):
        raise UnsupportedError(
            "a step that encodes or stores an output cannot pause or resume; leave max_steps and resume_from unset, or "
            "let the outputs be sent without a media_type and a uri"
        )


def _check_file(output: StreamedOutput, emitted: Emitted) -> None:
    if emitted.spec.ticket_kind:
        raise UnsupportedError(f"{output.tensor} is a ticket for another stage's engine, and cannot be an output")
    encodings = encodings_of(emitted)
    if output.media_type and output.media_type not in encodings:
        raise UnsupportedError(
            f"output {output.tensor} ({emitted.kind}, {emitted.spec}) cannot be encoded as "
            f"{output.media_type[:100]!r}; use {_one_of(encodings)}"
        )
    if output.uri and not output.media_type and encodings:
        raise InvalidRequestError(
            f"output {output.tensor} is to be stored without a media_type; use {_one_of(encodings)}"
        )
    is_video = output.media_type in VIDEO_ENCODINGS
    if is_video != (output.frame_rate != 0) or not 0 <= output.frame_rate <= MAX_FRAME_RATE:
        raise InvalidRequestError(
            f"output {output.tensor} has frame_rate {output.frame_rate:g}; use a number above 0, at most "
            f"{MAX_FRAME_RATE:g}, for video, and 0 for any other output"
        )


def _one_of(media_types: Sequence[str]) -> str:
    return f"one of {', '.join(media_types)}" if media_types else "no media_type"


def _check_prompt(task: Task, signature: Signature, *, engine: str) -> None:
    if task.prompt is None:
        raise empty_prompt_error()
    if task.negative_prompt and not signature.negative_prompt:
        raise _unsupported(engine, "accepts no negative prompt on this stage; omit it", ability="negative_prompt")
    media = media_of(task.prompt)
    if media and not signature.media:
        raise _unsupported(engine, f"accepts only text on this stage; omit the {media[0].kind}", ability="media")
    for medium in media:
        _check_medium(medium)


def _check_medium(medium: Medium) -> None:
    """Raises InvalidRequestError if the media type or the samples of an image, audio or video input are invalid. Does
    not decode the input.
    """
    if not isinstance(medium, MediaFile):
        _check_samples(medium)
    elif medium.media_type not in MEDIA_TYPES[medium.kind]:
        raise InvalidRequestError(
            f"{medium.kind} of media type {medium.media_type[:100]!r}; use one of "
            f"{', '.join(MEDIA_TYPES[medium.kind])}",
            reason="INVALID_MEDIA",
        )
    elif not medium.data and medium.reference is None:
        raise InvalidRequestError(f"{medium.kind} has no data and no uri; omit it", reason="INVALID_MEDIA")


def _check_samples(audio: Samples) -> None:
    samples = audio.samples
    if samples.dtype != np.float32 or samples.ndim not in (1, 2) or not samples.size:
        raise InvalidRequestError(
            f"audio is {samples.dtype}{list(samples.shape)}; it must be float32[samples] or float32[samples, "
            "channels], and must not be empty",
            reason="INVALID_MEDIA",
        )
    if audio.sample_rate_hz not in _SAMPLE_RATES_HZ:
        raise InvalidRequestError(
            f"audio is at {audio.sample_rate_hz} Hz; it must be at {_SAMPLE_RATES_HZ[0]} to {_SAMPLE_RATES_HZ[-1]} Hz",
            reason="INVALID_MEDIA",
        )
