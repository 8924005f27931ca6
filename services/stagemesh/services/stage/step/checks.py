"""Checks of a step's spec before the replica reserves resources for the step, and of what its engine then makes."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from stagemesh.common.errors import (
    InternalError,
    InvalidChunkError,
    InvalidRequestError,
    NotReadyError,
    UnsupportedError,
)
from stagemesh.common.media.encodings import MAX_FRAME_RATE, VIDEO_ENCODINGS, encodings_of
from stagemesh.common.plugins.descriptors import Emitted, Signature
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.common.requests.request_checks import check_choice_id, check_options, empty_prompt_error
from stagemesh.common.wire.tensors import Array, TensorSpec
from stagemesh.connectors.packets import Packet
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.services.engines.abilities import EngineAbilities, HandsOver
from stagemesh.services.engines.base import SamplingOptions, Task
from stagemesh.services.engines.prompts import MediaFile, Medium, Samples, media_of
from stagemesh.services.stage.step.spec import STATE_EDGE, Rebinding, StepSpec, StreamedOutput
from stagemesh.v1 import chunk_pb2

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
    lacking = {"offer": signature.emitted_kinds - able.offers, "accept": signature.accepted_kinds - able.accepts}
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
    _check_bindings(rebinding)


def _check_pause(spec: StepSpec) -> None:
    if spec.task.max_steps is None:
        if any(binding.edge == STATE_EDGE for binding in spec.outputs):
            raise InvalidRequestError(f"edge {STATE_EDGE} carries the state of a pause; set max_engine_steps with it")
        return
    if not spec.task.max_steps:
        raise InvalidRequestError("max_engine_steps is 0; set it to at least 1, or leave it unset")
    for binding in spec.outputs:
        if binding.edge != STATE_EDGE:
            raise InvalidRequestError(
                f"max_engine_steps is set together with the outgoing edge {binding.edge}; bind outgoing edges to the "
                "step that runs to its end, without max_engine_steps",
                reason="INVALID_EDGE",
            )


def _check_abilities(task: Task, signature: Signature, abilities: EngineAbilities, *, engine: str) -> None:
    if task.max_steps is not None and not abilities.can_pause:
        raise _unsupported(engine, "cannot pause; leave max_engine_steps unset to run the step to its end")
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
    _check_bindings(spec)
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


def _check_bindings(spec: StepSpec | Rebinding) -> None:
    for direction, bindings in (("inputs", spec.inputs), ("outputs", spec.outputs)):
        for edge, count in Counter(binding.edge for binding in bindings).items():
            if not edge or count > 1:
                problem = f"{edge!r} twice" if edge else "without a name"
                raise InvalidRequestError(f"{direction} contain an edge {problem}", reason="INVALID_EDGE")
        for binding in bindings:
            if binding.attempt < 1:
                raise InvalidRequestError(
                    f"edge {binding.edge} has attempt 0; attempts count from 1", reason="INVALID_EDGE"
                )
    for binding in spec.inputs:
        if not binding.peer:
            raise InvalidRequestError(f"edge {binding.edge} needs a producer", reason="INVALID_EDGE")
    for output in spec.outputs:
        if not output.peer.replica or not output.peer.endpoint:
            raise InvalidRequestError(f"edge {output.edge} needs a consumer and an endpoint", reason="INVALID_EDGE")


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
            "a step that encodes or stores an output cannot pause or resume; leave max_engine_steps and resume_from "
            "unset, or let the outputs be sent without a media_type and a uri"
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
    rate, is_video = output.frame_rate, output.media_type in VIDEO_ENCODINGS
    if is_video != (rate is not None) or not 0 < (1 if rate is None else rate) <= MAX_FRAME_RATE:
        raise InvalidRequestError(
            f"output {output.tensor} has frame_rate {rate}; use a number above 0, at most {MAX_FRAME_RATE:g}, for "
            "video, and omit it for any other output"
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
    """Raises InvalidRequestError if an image, audio or video input is empty or its samples are invalid. Does not decode
    the input.
    """
    if not isinstance(medium, MediaFile):
        _check_samples(medium)
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


_MAX_KNOWN = 64


class ResultCheck:
    """Checks packets by the types that a descriptor declares.

    A check takes about a microsecond for each packet, because the types that were correct are remembered.
    """

    def __init__(
        self, declared: Mapping[str, TensorSpec], *, maker: str, metadata: Mapping[str, str], same_lengths: bool = True
    ) -> None:
        """`maker` is what makes the packets, for example "function upper". Errors contain `metadata`.

        If `same_lengths` is True, a symbol in the declared shapes is the same length in all tensors of a packet.
        """
        self.maker = maker
        self._declared, self._metadata = declared, metadata
        self._same_lengths = same_lengths
        self._known: set[tuple[object, ...]] = set()

    def check(self, packet: Packet) -> None:
        """Raises InternalError (INVALID_RESULT) if a tensor of a packet is not declared, or has another type."""
        # A list makes the tuple faster than a generator would.
        kinds = tuple([(name, tensor.dtype, tensor.shape) for name, tensor in packet.tensors.items()])
        if kinds in self._known:
            return
        lengths: dict[str, int] = {}
        for name, tensor in packet.tensors.items():
            try:
                self._check_tensor(name, tensor, lengths)
            except InvalidChunkError as exc:
                raise InternalError(
                    f"{self.maker} made a wrong result: {exc.message}; correct it, or the types in its descriptor",
                    reason="INVALID_RESULT",
                    metadata={**self._metadata, "tensor": str(name)},
                ) from None
        if len(self._known) >= _MAX_KNOWN:
            self._known.clear()
        self._known.add(kinds)

    def _check_tensor(self, name: str, tensor: Array, lengths: dict[str, int]) -> None:
        spec = self._declared.get(name)
        if spec is None:
            names = ", ".join(self._declared) or "no tensor"
            raise InvalidChunkError(f"tensor {name!r} is not declared; declared: {names}")
        spec.check(name, tensor)
        if self._same_lengths:
            check_lengths(name, tensor, spec, lengths=lengths)


def check_lengths(name: str, tensor: Array, spec: TensorSpec, *, lengths: dict[str, int]) -> None:
    """Adds the lengths that the symbols of `spec` have in a tensor of a packet to `lengths`.

    Raises InvalidChunkError if a symbol has another length in another tensor of the packet.
    """
    for symbol, length in zip(spec.shape, tensor.shape, strict=True):
        if isinstance(symbol, str) and lengths.setdefault(symbol, length) != length:
            raise InvalidChunkError(
                f"tensor {name!r} has {length} {symbol}, but another tensor of its chunk has {lengths[symbol]}"
            )


def engine_result_check(config: StageConfig, signature: Signature) -> ResultCheck:
    """Returns the check of what a stage's engine makes."""
    maker = f"function {config.function}" if config.function else f"engine {config.engine}"
    return ResultCheck(
        {name: each.spec for name, each in signature.emits.items()},
        maker=f"{maker} of stage {config.stage}",
        metadata={"function": config.function} if config.function else {},
        same_lengths=False,
    )


class FiniteCheck:
    """Finds NaN and infinite values in the audio and in the images that a stage makes."""

    def __init__(self, emits: Mapping[str, Emitted], *, encoded: Sequence[str], maker: str, fails: bool) -> None:
        """`encoded` are the names of the tensors that are encoded as files. `maker` is what makes the packets.

        If `fails` is True, such a value raises an error. Otherwise, it adds a warning.
        """
        self._names = frozenset(chain(encoded, (name for name, each in emits.items() if each.kind == "audio")))
        self.checks = bool(self._names)
        """Whether `check` must be called for packets without values that the engine reports as not finite."""
        self._maker, self._fails = maker, fails
        self._found: dict[str, InternalError] = {}

    @property
    def warnings(self) -> list[chunk_pb2.Error]:
        """A warning for each tensor with such values."""
        return list(map(error_to_wire, self._found.values()))

    def check(self, packet: Packet, *, non_finite: Sequence[str] = ()) -> None:
        """Checks a packet. `non_finite` are the tensors that the engine has computed from non-finite values.

        Raises InternalError (NON_FINITE_RESULT) if the check fails and errors were requested.
        """
        for name in self._names:
            tensor = packet.tensors.get(name)
            if tensor is not None and tensor.dtype != np.uint8 and not np.isfinite(tensor).all():
                self._add(name)
        for name in non_finite:
            self._add(name)

    def _add(self, name: str) -> None:
        if name in self._found:
            return
        self._found[name] = error = InternalError(
            f"{self._maker} made NaN or infinite values of output {name!r}; the model computes wrongly, for example "
            "because the range of its dtype is too small",
            reason="NON_FINITE_RESULT",
            metadata={"tensor": name},
        )
        if self._fails:
            raise error
