"""Checks a client's request against the pipeline before the orchestrator reserves any resources for it."""

import secrets
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import cast

from stagemesh.common.errors import InvalidRequestError, NotFoundError, UnsupportedError
from stagemesh.common.requests.request_checks import (
    ATTEMPTS_A_CALL,
    check_caller,
    check_input,
    check_request_id,
    choice_id,
    empty_prompt_error,
    has_prompt,
    is_medium,
    parts_of,
    read_options,
)
from stagemesh.orchestrator.request.parameters import check_parameters
from stagemesh.orchestrator.request.streamed_input import StreamedInput
from stagemesh.pipeline import Pipeline
from stagemesh.pipeline.conditions import Fact, Facts, InputKind
from stagemesh.v1 import orchestrator_pb2, request_pb2

_MAX_EARLIER_CALLS = 1_000_000
SEEDS = 1 << 63
"""The number of possible seeds."""


@dataclass(frozen=True)
class ValidRequest:
    """A request that the pipeline can run. Its id and its seed were generated at random if the client omitted them."""

    request_id: str
    input: request_pb2.Input
    parameters: request_pb2.Parameters
    outputs: tuple[str, ...]
    priority: int = 0
    caller: str = ""
    first_attempt: int = 1
    """The number of each stage's first attempt.

    This number exceeds all attempt numbers that earlier calls of the same request may have used. The attempts that this
    call starts therefore replace the earlier attempts.
    """
    generation: str = ""
    """The generation whose outputs the client already has. Empty if it has none, so that any generation may run."""
    index: int = 0
    """The index of the choice that a run of the request produces."""
    stream: StreamedInput | None = None
    """The input that the client streams while the request runs. None if the input is complete from the start."""
    preferred: Mapping[str, str] = field(default_factory=dict[str, str])
    """The names of the replicas that stages use if they are not busier than others, by stage name."""
    parsed: bool = False
    """Whether stages may send text as messages (`Output.message`)."""
    running_attempt: int | None = None
    """The attempt of the steps that another orchestrator has started on the preferred replicas.

    The request continues with these steps if possible. None if it has not run, or has to run again.
    """

    @property
    def choices(self) -> int:
        """The number of choices. The request runs once for each of them."""
        return self.parameters.choices or 1

    @property
    def can_continue(self) -> bool:
        """Whether another orchestrator can continue with the steps: there is one choice and no streamed input."""
        return self.choices == 1 and self.stream is None

    @property
    def continues(self) -> bool:
        """Whether this run continues with the steps of another orchestrator."""
        return self.running_attempt is not None

    @property
    def choice_id(self) -> str:
        """The id by which stages know the choice with the index `index`."""
        return choice_id(self.request_id, self.index, caller=self.caller)

    @property
    def seed(self) -> int:
        """The random seed of the choice with the index `index`."""
        return (self.parameters.seed + self.index) % SEEDS

    @property
    def facts(self) -> Facts:
        """The properties of the request that the pipeline's conditions refer to.

        These are the options that the request sets, the kinds of its input, and its requested outputs.
        """
        options = read_options(self.parameters.options)
        return {
            **{Fact("option", name): value for name, value in options.items() if not isinstance(value, str)},
            **{Fact("input", kind): 1.0 for kind in _input_kinds(self.input)},
            **({Fact("input", "stream"): 1.0} if self.stream is not None else {}),
            **{Fact("output", name): 1.0 for name in self.outputs},
        }


def validate(
    request: orchestrator_pb2.GenerateRequest, pipeline: Pipeline, *, stream: StreamedInput | None = None
) -> ValidRequest:
    """Checks a client's request, and returns it with default values added.

    `stream` is the input that the client streams, or None if the request contains its input. With `stream`, the
    request has no input of its own, and wants by default all outputs whose stages need no prompt. Otherwise, it wants
    by default all outputs whose stages need no streamed input.

    Raises InvalidRequestError, NotFoundError, UnsupportedError or InvalidChunkError if the pipeline cannot run the
    request. The error message says how to fix the request.
    """
    check_pipeline(request.pipeline, pipeline)
    if request.request_id:
        check_request_id(request.request_id)
    _check_caller(request)
    outputs = _check_outputs(request.outputs, pipeline)
    _check_outputs((each.name for each in request.next_positions), pipeline)
    _check_choices(request, most=pipeline.limits.largest_request if stream is None else 1)
    check_input(request.input)
    if stream is None:
        _check_prompt(request.input)
    else:
        assert not request.input.ByteSize(), "a streamed request has no other input"
    _check_support(request, pipeline)
    check_parameters(request.parameters, pipeline)
    parameters = request_pb2.Parameters()
    parameters.CopyFrom(request.parameters)
    if parameters.seed >= SEEDS:
        raise InvalidRequestError(f"seed is {parameters.seed}; use 0 to {SEEDS - 1}")
    if not parameters.HasField("seed"):
        # Half of the digits are enough, and every programming language has numbers for them.
        parameters.seed = secrets.randbits(32)
    valid = ValidRequest(
        request_id=request.request_id or uuid.uuid4().hex,
        input=request.input,
        parameters=parameters,
        outputs=outputs,
        priority=request.priority,
        caller=request.caller,
        first_attempt=first_attempt(request.earlier_calls),
        generation=request.generation,
        stream=stream,
        preferred=request.preferred_replicas,
        parsed=request.parsed,
    )
    running_attempt = _running_attempt(request)
    return replace(
        valid, outputs=_check_fed(valid, pipeline), running_attempt=running_attempt if valid.can_continue else None
    )


def first_attempt(earlier_calls: int) -> int:
    """Returns the number of each stage's first attempt, which exceeds those that the earlier calls may have used."""
    return 1 + ATTEMPTS_A_CALL * earlier_calls


def _running_attempt(request: orchestrator_pb2.GenerateRequest) -> int | None:
    if not request.HasField("admitted_call"):
        return None
    if request.admitted_call >= request.earlier_calls:
        raise InvalidRequestError(
            f"admitted_call is {request.admitted_call}; it must be lower than earlier_calls, which is "
            f"{request.earlier_calls}",
            reason="INVALID_EARLIER_CALLS",
        )
    return first_attempt(request.admitted_call)


def check_pipeline(name: str, pipeline: Pipeline) -> None:
    """Raises NotFoundError (UNKNOWN_PIPELINE) if `name` is neither empty nor the name of the served pipeline."""
    if name not in ("", pipeline.name):
        raise NotFoundError(
            f"pipeline {name[:100]!r} is not served here; this orchestrator serves {pipeline.name!r}",
            reason="UNKNOWN_PIPELINE",
            metadata={"pipeline": name},
        )


def _check_caller(request: orchestrator_pb2.GenerateRequest) -> None:
    check_caller(request.caller)
    if request.earlier_calls > _MAX_EARLIER_CALLS:
        raise InvalidRequestError(
            f"earlier_calls is {request.earlier_calls}; it may be at most {_MAX_EARLIER_CALLS}",
            reason="INVALID_EARLIER_CALLS",
        )


def _check_outputs(names: Iterable[str], pipeline: Pipeline) -> tuple[str, ...]:
    unknown = [name for name in names if name not in pipeline.outputs]
    if unknown:
        raise InvalidRequestError(
            f"unknown output {unknown[0][:99]!r}; pipeline {pipeline.name!r} has {', '.join(sorted(pipeline.outputs))}",
            reason="UNKNOWN_OUTPUT",
            metadata={"output": unknown[0]},
        )
    return tuple(dict.fromkeys(names))


def _check_fed(request: ValidRequest, pipeline: Pipeline) -> tuple[str, ...]:
    """Returns the wanted outputs of a request: those that it names, or by default all that it can have.

    Raises UnsupportedError if a stage lacks its input: a prompt if the request streams its input, or streamed input if
    it does not.
    """
    if request.stream is None and not pipeline.input_edges:
        return request.outputs or tuple(pipeline.outputs)
    available = pipeline.available_outputs(replace(request, outputs=()).facts)
    outputs = request.outputs or available
    unfed = pipeline.route(outputs, request.facts).unfed
    if outputs and not unfed:
        return outputs
    if request.stream is None:
        what, remedy = "streamed input", "stream the input in a session (Converse)"
    elif not pipeline.input_edges:
        what, remedy = "a prompt, because no edge leads from @input", "use the input mode PROMPT"
    else:
        what, remedy = "a prompt", "use the input mode PROMPT"
    stages = " and ".join(repr(stage.name) for stage in unfed) or "every output"
    raise UnsupportedError(
        f"pipeline {pipeline.name!r} cannot make the wanted outputs: {stages} needs {what}; {remedy}, or want only "
        f"{', '.join(available) or 'outputs of another pipeline'}"
    )


def _check_prompt(given: request_pb2.Input) -> None:
    if not has_prompt(given) and (given.WhichOneof("prompt") or not given.tensors):
        raise empty_prompt_error()


def _check_choices(request: orchestrator_pb2.GenerateRequest, *, most: int) -> None:
    """Raises InvalidRequestError (INVALID_CHOICES) if the number of choices is not from 1 to `most`.

    Also raises this error if the caller's positions name a choice that the request does not have, and if several
    choices would each report the log-probabilities of their prompt, which is the same.
    """
    choices = request.parameters.choices if request.parameters.HasField("choices") else 1
    if not 1 <= choices <= most:
        problem = f"choices is {choices}; use 1 to {most} (limits.max_choices), or send several requests"
    elif choices > 1 and request.parameters.sampling.HasField("prompt_logprobs"):
        problem = f"prompt_logprobs are reported for one choice, and the request has {choices}; send several requests"
    elif (highest := max((each.index for each in request.next_positions), default=0)) >= choices:
        problem = f"next_positions names choice {highest}, but the request has {choices} choices, counted from 0"
    else:
        return
    raise InvalidRequestError(problem, reason="INVALID_CHOICES", metadata={"max_choices": str(most)})


def _check_support(request: orchestrator_pb2.GenerateRequest, pipeline: Pipeline) -> None:
    """Raises UnsupportedError if the request contains media or a negative prompt that no stage accepts.

    Does not decode media. The stage that decodes the media also checks their content.
    """
    given = request.input
    signatures = [stage.signature for stage in pipeline.stages.values()]
    no_stage = f"no stage of pipeline {pipeline.name!r} accepts"
    for part in parts_of(given):
        _check_reference(part, pipeline)
    has_media = any(map(is_medium, parts_of(given)))
    if has_media and not any(signature.media for signature in signatures):
        raise UnsupportedError(
            f"{no_stage} images, audio or video; omit them, or choose a pipeline whose model accepts them"
        )
    if given.negative_prompt and not any(signature.negative_prompt for signature in signatures):
        raise UnsupportedError(f"{no_stage} a negative prompt; omit it")


def _check_reference(part: request_pb2.Part, pipeline: Pipeline) -> None:
    """Raises UnsupportedError or PermissionDeniedError if a part refers to a file that the pipeline does not allow."""
    for _, file in part.ListFields():
        if isinstance(file, request_pb2.MediaFile) and file.WhichOneof("content") == "uri":
            if pipeline.media is None:
                raise UnsupportedError(
                    f"pipeline {pipeline.name!r} has no store to which requests may refer; send the file in the "
                    "request, or add `media:` to the pipeline file"
                )
            pipeline.media.located(file.uri)


def _input_kinds(given: request_pb2.Input) -> Iterator[InputKind]:
    if given.text or given.raw_text or any(message.content for message in given.conversation.messages):
        yield "text"
    if given.token_ids.ids:
        yield "tokens"
    if given.tensors:
        yield "tensors"
    for part in parts_of(given):
        content = part.WhichOneof("content")
        if content is not None:
            yield cast("InputKind", content.removesuffix("_file"))
        if part.use_audio_in_video:
            yield "audio"
