"""The interface of request features, which extend the vllm engine. Each feature has its own module or folder.

`VllmEngine` has a list of features and uses only this interface. A feature sends arguments to vLLM's other processes
together with a request, in `SamplingParams.extra_args`. An argument is a msgspec struct. It is converted to built-in
types and stored under the name of its class. This module does not import vLLM.
"""

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import msgspec

from stagemesh.services.engines.base import EngineEvent, Task

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from stagemesh.services.engines.vllm.conversion import CheckedParams

RUNNER_MODULES = "stagemesh_runner_modules"
"""The key of vLLM's `additional_config` under which the features' runner modules are listed."""
UNLIMITED = 1 << 40
MAX_TOKENS_AHEAD = 256
"""The maximum number of tokens that vLLM computes ahead of a request's consumer.

The distance is counted from the last token whose row the consumer has received.
"""


T = TypeVar("T", bound=msgspec.Struct)


class RequestLimit:
    """The run-ahead limit of one request. After the request has started, the limit never decreases."""

    def __init__(self) -> None:
        self._arrived = self._ahead = UNLIMITED
        self.on_change: Callable[[], None] | None = None

    @property
    def position(self) -> int:
        """The limit: the first token position that vLLM must not compute yet.

        The inputs of all earlier positions have arrived, and the consumer is at most `MAX_TOKENS_AHEAD` tokens behind.
        """
        return min(self._arrived, self._ahead)

    def set_arrived(self, position: int) -> None:
        """Records that the inputs of all positions before `position` have arrived."""
        self._move(position, self._ahead)

    def set_taken(self, position: int) -> None:
        """Records that the consumer has received the outputs of all positions before `position`."""
        ahead = position + MAX_TOKENS_AHEAD
        # Not updated for every token, because each change is a message to the engine core.
        if self._ahead == UNLIMITED or ahead - self._ahead >= MAX_TOKENS_AHEAD // 2:
            self._move(self._arrived, ahead)

    def _move(self, arrived: int, ahead: int) -> None:
        before = self.position
        self._arrived, self._ahead = arrived, ahead
        if self.position != before and self.on_change is not None:
            self.on_change()


@dataclass(frozen=True, eq=False)
class RequestPrompt:
    """A prompt that a feature or the tokenizer has converted to the form that vLLM accepts."""

    token_ids: list[int]
    """The token ids of the prompt. A placeholder token represents each position of media or of an embedding."""
    engine_input: Mapping[str, object] = field(default_factory=lambda: {"type": "token"})
    """The fields of vLLM's `EngineInput` other than `prompt_token_ids`."""
    digest: bytes = b""
    """A digest of the content that `token_ids` do not represent, such as media. Empty if there is no such content."""


@dataclass
class EngineRequest:
    """The state of a task that runs in vLLM."""

    task: Task
    name: str
    """The request's id in vLLM, unique within the engine."""
    prompt: RequestPrompt
    params: "CheckedParams"
    """The sampling parameters. Features may change them in `open`."""
    sampled: list[int] = field(default_factory=list[int])
    """The tokens sampled so far, including the tokens of the checkpoint from which the task resumed."""
    limit: RequestLimit = field(default_factory=RequestLimit)
    """The run-ahead limit, which determines how many token positions vLLM may compute."""

    @property
    def known_tokens(self) -> int:
        """The total number of prompt tokens and sampled tokens."""
        return len(self.prompt.token_ids) + len(self.sampled)

    @property
    def computed_tokens(self) -> int:
        """The number of token positions that the model has computed.

        The model has not computed the last sampled token yet.
        """
        return self.known_tokens - 1


class RequestHook:
    """A feature's handler for one running request. The methods do nothing unless a feature overrides them."""

    def observe(self, *, finished: bool) -> Iterable[EngineEvent]:  # noqa: ARG002  # for the overriding methods
        """Returns the feature's events for an output of vLLM.

        `EngineRequest.sampled` already contains the output's tokens. The engine iterates over the events as fast as the
        consumer accepts them. `finished` is True for the request's last output.
        """
        return ()

    async def finish(self) -> AsyncGenerator[EngineEvent]:
        """Yields the feature's remaining events after the request's last output."""
        none: tuple[EngineEvent, ...] = ()
        for event in none:
            yield event


class RequestFeature:
    """An extension of the vllm engine, such as media in prompts. A method does nothing unless a feature overrides it.

    The engine calls `set_arguments`, `configure` and `start` once each, in this order. It calls `read_prompt` and
    `open` for each request, and `close` at the end.
    """

    runner_module: str | None = None
    """The name of a module with mixins for vLLM's model runners, or None if the feature has no mixins.

    The module contains the classes `RunnerV1` and `RunnerV2`. A worker adds one of them to the class of the existing
    model runner. Therefore the mixins have no `__init__`.
    """
    llm: "AsyncLLM"
    """The running vLLM engine. Set by `start`."""

    def set_arguments(self, arguments: "AsyncEngineArgs") -> None:
        """Sets the engine arguments that the feature needs. Raises InvalidRequestError if the options conflict."""

    def configure(self, config: "VllmConfig") -> None:
        """Checks and changes vLLM's configuration before the engine is created.

        Raises InvalidRequestError if the model or the configuration does not support the feature.
        """

    async def start(self, llm: "AsyncLLM") -> None:
        """Prepares the feature after vLLM has started and before the first request. Overrides call this method."""
        self.llm = llm

    async def read_prompt(self, task: Task, name: str, held: AsyncExitStack) -> RequestPrompt | None:  # noqa: ARG002
        """Returns the prompt of a task, or None if this feature does not read the task's prompt.

        `name` is the request's id in vLLM. The feature adds callbacks to `held` that release the request's resources.
        """
        return None

    def open(self, request: EngineRequest, held: AsyncExitStack) -> RequestHook | None:  # noqa: ARG002
        """Prepares a request immediately before vLLM receives it.

        Returns a hook that observes the request, or None if the feature does not observe it. The feature adds callbacks
        to `held` that release the request's resources.
        """
        return None

    def close(self) -> None:
        """Releases all resources after vLLM has shut down. May be called more than once."""


def set_argument(params: "SamplingParams", argument: msgspec.Struct) -> None:
    """Adds an argument to a request's sampling parameters. Replaces an earlier argument of the same class."""
    arguments = params.extra_args or {}
    params.extra_args = {**arguments, _key(type(argument)): msgspec.to_builtins(argument)}


def get_argument(params: "SamplingParams | None", kind: type[T]) -> T | None:
    """Returns the argument of class `kind` from a request's sampling parameters, or None if there is none."""
    arguments = params.extra_args if params is not None else None
    if not arguments or _key(kind) not in arguments:
        return None
    return msgspec.convert(arguments[_key(kind)], kind)


def track_arguments(known: dict[str, T], step: "SchedulerOutput", kind: type[T]) -> None:
    """Updates `known`, which contains the arguments of class `kind` of the running requests, by request id.

    Adds the arguments of the step's new requests, and removes the arguments of finished requests.
    """
    for request_id in step.finished_req_ids:
        known.pop(request_id, None)
    for new in step.scheduled_new_reqs:
        if (argument := get_argument(new.sampling_params, kind)) is not None:
            known[new.req_id] = argument


def _key(kind: type[msgspec.Struct]) -> str:
    return f"stagemesh.{kind.__name__}"
