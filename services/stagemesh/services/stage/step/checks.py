"""The checks that an order passes before anything is held for it."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from stagemesh.common.descriptors import Signature
from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.services.engines.base import Checkpoint, Prompt, SamplingOptions, Structure, Task, media_of
from stagemesh.services.engines.media import MEDIA_TYPES, MediaFile, Medium, Samples
from stagemesh.services.stage.step.spec import STATE_EDGE, OutputBinding, Rebinding, StepSpec

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# An orchestrator puts request, stage and attempt into it.
_STEP_ID = re.compile(r"[A-Za-z0-9._:/-]{1,256}")
_SAMPLING: Mapping[str, tuple[str, Callable[[float], bool]]] = {
    "max_tokens": ("at least 1", lambda value: value >= 1),
    "temperature": ("at least 0", lambda value: value >= 0),
    "top_p": ("over 0 and at most 1", lambda value: 0 < value <= 1),
    "min_p": ("from 0 to 1", lambda value: 0 <= value <= 1),
    "repetition_penalty": ("over 0", lambda value: value > 0),
    "presence_penalty": ("from -2 to 2", lambda value: -2 <= value <= 2),
    "frequency_penalty": ("from -2 to 2", lambda value: -2 <= value <= 2),
}
_ROLES = frozenset({"system", "user", "assistant"})
_SAMPLE_RATES_HZ = range(1_000, 384_001)


def check_order(
    order: StepSpec, signature: Signature, *, engine: str, resumable: bool = False, pausable: bool = False
) -> None:
    """Raises InvalidRequestError or UnsupportedError, naming what is wrong and what is allowed.

    `engine` is the engine's name, `resumable` and `pausable` whether it has those abilities.
    """
    check_request_id(order.request_id)
    if not _STEP_ID.fullmatch(order.step_id):
        raise InvalidRequestError(
            f"step_id is {order.step_id[:270]!r}; it must be 1 to 256 letters, digits, '.', '_', ':', '-' or '/'",
            reason="INVALID_ID",
        )
    if order.attempt < 1:
        raise InvalidRequestError("attempt is 0; attempts count from 1")
    _check_abilities(order.task, engine=engine, resumable=resumable, pausable=pausable)
    _check_pause(order)
    _check_checkpoint(order.task.resume_from, signature)
    _check_edges(order, signature)
    _check_absent(order.task.absent, signature)
    _check_known("tensor", order.streamed, signature.emits)
    _check_options(order.task, signature)
    if order.task.adapter is not None and not signature.adapters:
        raise UnsupportedError(
            f"engine {engine} takes no adapters on this stage; leave adapter unset, or start it with the option "
            "enable_lora where the engine has that",
            metadata={"engine": engine, "ability": "adapters"},
        )
    _check_sampling(order.task.sampling)
    if not signature.accepts:
        _check_prompt(order.task.prompt)
        _check_negative_prompt(order.task, signature, engine=engine)
        _check_media(media_of(order.task.prompt), signature, engine=engine)


def check_request_id(request_id: str) -> None:
    """Raises InvalidRequestError for what cannot name a request."""
    if not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequestError(
            f"request_id is {request_id[:140]!r}; it must be 1 to 128 letters, digits, '.', '_', ':' or '-'",
            reason="INVALID_ID",
        )


def check_rebinding(rebinding: Rebinding) -> None:
    """Raises InvalidRequestError, naming what is wrong and what is allowed."""
    check_request_id(rebinding.request_id)
    inputs = [each.binding for each in rebinding.inputs]
    _check_edge_names(
        [("inputs", [each.edge for each in inputs]), ("outputs", [each.edge for each in rebinding.outputs])]
    )
    _check_consumers(rebinding.outputs)
    for binding in inputs:
        if not binding.producer:
            raise InvalidRequestError(f"edge {binding.edge} needs a producer", reason="INVALID_EDGE")


def _check_pause(order: StepSpec) -> None:
    if order.task.max_steps is None:
        if any(binding.edge == STATE_EDGE for binding in order.outputs):
            raise InvalidRequestError(f"edge {STATE_EDGE} carries what a pause leaves; set max_steps with it")
        return
    if not order.task.max_steps:
        raise InvalidRequestError("max_steps is 0; ask for one step at least, or leave it unset")
    for binding in order.outputs:
        if binding.edge == STATE_EDGE:
            continue
        raise InvalidRequestError(
            f"max_steps with the outgoing edge {binding.edge}; bind outgoing edges where the step runs to its "
            "end, without max_steps",
            reason="INVALID_EDGE",
        )


def _check_abilities(task: Task, *, engine: str, resumable: bool, pausable: bool) -> None:
    if task.max_steps is not None and not pausable:
        raise UnsupportedError(
            f"engine {engine} cannot pause; leave max_steps unset to run the step to its end",
            metadata={"engine": engine},
        )
    if task.resume_from is not None and not resumable:
        raise UnsupportedError(
            f"engine {engine} cannot resume; leave resume_from unset to run the step from its start",
            metadata={"engine": engine},
        )


def _check_checkpoint(resume_from: Checkpoint | None, signature: Signature) -> None:
    for name in {**resume_from.outputs, **resume_from.rows} if resume_from is not None else ():
        if name not in signature.emits:
            raise InvalidRequestError(
                f"the checkpoint counts {name!r}; this stage knows {', '.join(signature.emits) or 'none'}",
                reason="INVALID_CHECKPOINT",
            )


def _check_edges(order: StepSpec, signature: Signature) -> None:
    _check_edge_names(
        [
            ("inputs", [binding.edge for binding in order.inputs]),
            ("outputs", [binding.edge for binding in order.outputs]),
        ]
    )
    _check_consumers(order.outputs)
    for binding in order.outputs:
        _check_known("tensor", binding.tensors, signature.emits)
    if order.task.resume_from is None and order.takes_state:
        raise InvalidRequestError(
            f"edge {STATE_EDGE} brings a state to go on from; set resume_from to its steps with it"
        )
    if any(binding.edge != STATE_EDGE for binding in order.inputs) and not signature.accepts:
        bound = ", ".join(binding.edge for binding in order.inputs)
        raise InvalidRequestError(f"this stage takes the prompt and no edge; unbind {bound}", reason="UNKNOWN_EDGE")
    if signature.accepts and not order.inputs and order.task.resume_from is None:
        raise InvalidRequestError(
            f"nothing feeds this stage; bind an edge that brings {', '.join(signature.accepts)}",
            reason="MISSING_INPUT",
        )


def _check_edge_names(directions: Iterable[tuple[str, Iterable[str]]]) -> None:
    for direction, edges in directions:
        for edge, count in Counter(edges).items():
            if not edge or count > 1:
                problem = f"{edge!r} twice" if edge else "without a name"
                raise InvalidRequestError(f"{direction} hold an edge {problem}", reason="INVALID_EDGE")


def _check_consumers(bindings: Iterable[OutputBinding]) -> None:
    for binding in bindings:
        if not binding.consumer or not binding.endpoint:
            raise InvalidRequestError(f"edge {binding.edge} needs a consumer and an endpoint", reason="INVALID_EDGE")


def _check_absent(absent: Iterable[str], signature: Signature) -> None:
    missing = sorted(set(absent) & signature.accepts.keys() - signature.optional)
    if missing:
        raise InvalidRequestError(
            f"no edge brings {', '.join(missing)}, and this stage does not run without; bind an edge that does",
            reason="MISSING_INPUT",
        )


def _check_known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    for name in names:
        if name not in known:
            raise InvalidRequestError(
                f"unknown {what} {name!r}; this stage knows {', '.join(known) or 'none'}",
                reason=f"UNKNOWN_{what.upper()}",
            )


def _check_options(task: Task, signature: Signature) -> None:
    _check_known("option", task.options, signature.options)
    for name, value in task.options.items():
        spec = signature.options[name]
        if not spec.minimum <= value <= spec.maximum:
            raise InvalidRequestError(
                f"option {name} is {value:g}; it must be from {spec.minimum:g} to {spec.maximum:g}",
                reason="INVALID_OPTION",
            )


def _check_sampling(sampling: SamplingOptions) -> None:
    for name, (allowed, holds) in _SAMPLING.items():
        value: float | None = getattr(sampling, name)
        if value is not None and not (math.isfinite(value) and holds(value)):
            raise InvalidRequestError(f"{name} is {value:g}; it must be {allowed}", reason="INVALID_SAMPLING")
    if "" in sampling.stop:
        raise InvalidRequestError("a stop text is empty; leave it out", reason="INVALID_SAMPLING")
    if not all(word.strip() for word in sampling.bad_words):
        raise InvalidRequestError("one of bad_words is empty; leave it out", reason="INVALID_SAMPLING")
    if sampling.max_tokens is not None and sampling.min_tokens > sampling.max_tokens:
        raise InvalidRequestError(
            f"min_tokens is {sampling.min_tokens} and max_tokens {sampling.max_tokens}; lower one, or raise the other",
            reason="INVALID_SAMPLING",
        )
    if sampling.structure is not None:
        _check_structure(sampling.structure, sampling)


def _check_structure(structure: Structure, sampling: SamplingOptions) -> None:
    if not structure.texts or not all(text.strip() for text in structure.texts):
        problem = "holds no text, or an empty one" if structure.kind == "choice" else "is empty"
        raise InvalidRequestError(
            f"{structure.kind} {problem}; say what the output must be, or leave it unset", reason="INVALID_SAMPLING"
        )
    if sampling.min_tokens or sampling.ignore_eos:
        other = "min_tokens" if sampling.min_tokens else "ignore_eos"
        raise InvalidRequestError(
            f"{other} contradicts {structure.kind}, which says where the output ends; leave one of them out",
            reason="INVALID_SAMPLING",
        )


def _check_prompt(prompt: Prompt | None) -> None:
    if not prompt or (isinstance(prompt, str) and not prompt.strip()):
        raise InvalidRequestError(
            "the prompt is empty; give some text, a conversation or token ids", reason="EMPTY_PROMPT"
        )
    if isinstance(prompt, str):
        return
    for message in prompt:
        if not isinstance(message, int) and message.role not in _ROLES:
            raise InvalidRequestError(
                f"a message's role is {message.role!r}; it must be {', '.join(sorted(_ROLES))}", reason="INVALID_ROLE"
            )


def _check_negative_prompt(task: Task, signature: Signature, *, engine: str) -> None:
    if task.negative_prompt and not signature.negative_prompt:
        raise UnsupportedError(
            f"engine {engine} takes no negative prompt on this stage; leave it out",
            metadata={"engine": engine, "ability": "negative_prompt"},
        )


def _check_media(media: Sequence[Medium], signature: Signature, *, engine: str) -> None:
    """What can be said without decoding anything."""
    if media and not signature.media:
        raise UnsupportedError(
            f"engine {engine} takes text alone on this stage; leave the {media[0].kind} out",
            metadata={"engine": engine, "ability": "media"},
        )
    for medium in media:
        if not isinstance(medium, MediaFile):
            _check_sound(medium)
        elif medium.media_type not in MEDIA_TYPES[medium.kind]:
            raise InvalidRequestError(
                f"{medium.kind} of media type {medium.media_type[:100]!r}; use one of "
                f"{', '.join(MEDIA_TYPES[medium.kind])}",
                reason="INVALID_MEDIA",
            )
        elif not medium.data:
            raise InvalidRequestError(f"{medium.kind} without data; leave it out", reason="INVALID_MEDIA")


def _check_sound(sound: Samples) -> None:
    samples = sound.samples
    if samples.dtype != np.float32 or samples.ndim not in (1, 2) or not samples.size:
        raise InvalidRequestError(
            f"audio is {samples.dtype}{list(samples.shape)}; it must be float32[samples] or float32[samples, "
            "channels], and not empty",
            reason="INVALID_MEDIA",
        )
    if sound.sample_rate_hz not in _SAMPLE_RATES_HZ:
        raise InvalidRequestError(
            f"audio is at {sound.sample_rate_hz} Hz; it must be at {_SAMPLE_RATES_HZ[0]} to {_SAMPLE_RATES_HZ[-1]} Hz",
            reason="INVALID_MEDIA",
        )
