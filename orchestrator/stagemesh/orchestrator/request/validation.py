"""Checks a client's request against the pipeline before anything is held for it."""

import re
import secrets
import uuid
from collections.abc import Iterable
from dataclasses import dataclass

from stagemesh.common.errors import InvalidRequestError, NotFoundError, UnsupportedError
from stagemesh.common.request_checks import (
    check_input,
    check_options,
    check_request_id,
    check_sampling,
    empty_prompt_error,
    has_prompt,
    is_medium,
)
from stagemesh.orchestrator.spec import Pipeline
from stagemesh.v1 import orchestrator_pb2, request_pb2

_CALLER = re.compile(r"[A-Za-z0-9._:@/-]{0,128}")
_MAX_EARLIER_CALLS = 1_000_000
_ATTEMPTS_A_CALL = 1000


@dataclass(frozen=True)
class ValidRequest:
    """A request that the pipeline can run, with its id and seed drawn where the client gave none."""

    request_id: str
    input: request_pb2.Input
    parameters: request_pb2.Parameters
    outputs: tuple[str, ...]
    priority: int = 0
    caller: str = ""
    first_attempt: int = 1
    """At each stage's share; above all that earlier calls may have begun, so that it takes over from them."""

    @property
    def seed(self) -> int:
        """The seed in force."""
        return self.parameters.seed


def validate(request: orchestrator_pb2.GenerateRequest, pipeline: Pipeline) -> ValidRequest:
    """The request as the pipeline will run it; raises InvalidRequestError or NotFoundError with the remedy."""
    check_pipeline(request.pipeline, pipeline)
    if request.request_id:
        check_request_id(request.request_id)
    _check_caller(request.caller)
    outputs = _check_outputs(request.outputs, pipeline)
    _check_outputs(request.next_seqs, pipeline)
    _check_outputs(request.next_positions, pipeline)
    _check_earlier_calls(request.earlier_calls)
    check_input(request.input)
    if not has_prompt(request.input) and (request.input.WhichOneof("prompt") or not request.input.tensors):
        raise empty_prompt_error()
    _check_media(request.input, pipeline)
    _check_negative_prompt(request.input, pipeline)
    check_options(request.parameters.options, pipeline.options, owner=f"pipeline {pipeline.name!r}")
    check_sampling(request.parameters.sampling)
    if request.parameters.HasField("adapter"):
        _check_adapters(pipeline)
    parameters = request_pb2.Parameters()
    parameters.CopyFrom(request.parameters)
    if not parameters.HasField("seed"):
        parameters.seed = secrets.randbits(32)
    return ValidRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        input=request.input,
        parameters=parameters,
        outputs=outputs,
        priority=request.priority,
        caller=request.caller,
        first_attempt=1 + _ATTEMPTS_A_CALL * request.earlier_calls,
    )


def check_pipeline(name: str, pipeline: Pipeline) -> None:
    """Raises NotFoundError (UNKNOWN_PIPELINE) unless `name` is empty or that of the pipeline served."""
    if name not in ("", pipeline.name):
        raise NotFoundError(
            f"pipeline {name!r} is not served here; this orchestrator serves {pipeline.name!r}",
            reason="UNKNOWN_PIPELINE",
            metadata={"pipeline": name},
        )


def _check_caller(caller: str) -> None:
    if _CALLER.fullmatch(caller) is None:
        raise InvalidRequestError(
            f'caller is {caller[:140]!r}; use up to 128 letters, digits and "._:@/-", or none at all',
            reason="INVALID_CALLER",
        )


def _check_earlier_calls(earlier_calls: int) -> None:
    if earlier_calls > _MAX_EARLIER_CALLS:
        raise InvalidRequestError(
            f"earlier_calls is {earlier_calls}; it may be {_MAX_EARLIER_CALLS}", reason="INVALID_EARLIER_CALLS"
        )


def _check_outputs(names: Iterable[str], pipeline: Pipeline) -> tuple[str, ...]:
    unknown = [name for name in names if name not in pipeline.outputs]
    if unknown:
        raise InvalidRequestError(
            f"unknown output {unknown[0]!r}; pipeline {pipeline.name!r} has {', '.join(sorted(pipeline.outputs))}",
            reason="UNKNOWN_OUTPUT",
            metadata={"output": unknown[0]},
        )
    return tuple(dict.fromkeys(names)) or tuple(pipeline.outputs)


def _check_media(given: request_pb2.Input, pipeline: Pipeline) -> None:
    """What a medium holds is for the stage to say, which decodes it."""
    if not any(is_medium(part) for message in given.conversation.messages for part in message.parts):
        return
    if not any(stage.signature.media for stage in pipeline.stages.values()):
        raise UnsupportedError(
            f"no stage of pipeline {pipeline.name!r} takes pictures, sound or films; leave them out, or choose one "
            "with a model that does"
        )


def _check_negative_prompt(given: request_pb2.Input, pipeline: Pipeline) -> None:
    if given.negative_prompt and not any(stage.signature.negative_prompt for stage in pipeline.stages.values()):
        raise UnsupportedError(f"no stage of pipeline {pipeline.name!r} takes a negative prompt; leave it out")


def _check_adapters(pipeline: Pipeline) -> None:
    if not any(stage.signature.adapters for stage in pipeline.stages.values()):
        raise UnsupportedError(
            f"no stage of pipeline {pipeline.name!r} takes adapters; leave adapter unset, or start one with the option "
            "enable_lora where its engine has that"
        )
