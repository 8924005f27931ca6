"""The interface of request features, which extend the vllm engine. Each feature has its own module or folder.

`VllmEngine` has a list of features and uses only this interface. With a request, a feature can send arguments to vLLM's
other processes, in `SamplingParams.extra_args`. An argument is a msgspec struct, which is converted to built-in types
and stored under the name of its class. This module does not import vLLM.
"""

import hashlib
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import numpy as np

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.wire.tensors import Tensors
from stagemesh.services.engines.base import EngineEvent, Task
from stagemesh.services.engines.vllm.run_ahead_limit import RequestLimit

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from stagemesh.services.engines.vllm.messages.feature import MessageReader
    from stagemesh.services.engines.vllm.outputs import LogprobsReader
    from stagemesh.services.engines.vllm.requests import CheckedParams


RUNNER_MODULES = "stagemesh_runner_modules"
"""The key in vLLM's `additional_config` of the list of the features' runner modules."""
DIGEST_BYTES = 8


T = TypeVar("T", bound=msgspec.Struct)


@dataclass(frozen=True, eq=False)
class RequestPrompt:
    """A prompt in the form that vLLM accepts, created by a feature or by the tokenizer."""

    token_ids: list[int]
    """The token ids of the prompt. Each position of a medium or of an embedding contains a placeholder token."""
    engine_input: Mapping[str, object] = field(default_factory=lambda: {"type": "token"})
    """The fields of vLLM's `EngineInput` except `prompt_token_ids`."""
    digest: bytes = b""
    """A digest of the prompt's content that is not in `token_ids`, such as media. Empty if there is no such
    content.
    """

    @property
    def fingerprint(self) -> bytes:
        """A digest of the whole prompt, of `DIGEST_BYTES` bytes."""
        data = np.asarray(self.token_ids, np.int64).tobytes() + self.digest
        return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


@dataclass
class EngineRequest:
    """A request that runs in vLLM: the task, its prompt and parameters, and its progress."""

    task: Task
    name: str
    """The request's id in vLLM. Unique within the engine, even across attempts of the same request."""
    prompt: RequestPrompt
    params: "CheckedParams"
    """The sampling parameters. A feature may change them in `open`."""
    logprobs: "LogprobsReader | None" = None
    """The reader of the request's log-probabilities. None if the task does not request them."""
    message: "MessageReader | None" = None
    """The reader of the request's message. None if the caller receives the text."""
    sampled: list[int] = field(default_factory=list[int])
    """The tokens sampled so far. If the task was resumed, they start with the tokens of the checkpoint."""
    saved_state: "Callable[[int], tuple[int, Tensors]] | None" = None
    """A function of a feature that returns what a checkpoint must contain in addition to tokens, or None.

    The function receives the number of sampled tokens. It returns the number of them that the checkpoint may contain,
    and tensors by name.
    """
    limit: RequestLimit = field(default_factory=RequestLimit)
    """The run-ahead limit. vLLM computes only the token positions before the limit."""
    kv_transfer_params: Mapping[str, Any] | None = None
    """The parameters with which another engine finds the KV cache of the finished request, or None if it is freed."""

    @property
    def counts(self) -> tuple[int, int] | None:
        """The numbers of prompt tokens and sampled tokens, or None if the task does not request them."""
        return (len(self.prompt.token_ids), len(self.sampled)) if self.task.sampling.count_tokens else None

    @property
    def known_tokens(self) -> int:
        """The total number of prompt tokens and sampled tokens."""
        return len(self.prompt.token_ids) + len(self.sampled)

    @property
    def computed_tokens(self) -> int:
        """The number of token positions that the model has computed.

        Excludes the last sampled token, which is not computed yet.
        """
        return self.known_tokens - 1


class RequestHook:
    """A feature's handler for the events of one running request. By default, the methods do nothing."""

    def observe(self, *, finished: bool) -> Iterable[EngineEvent]:  # noqa: ARG002  # for the overriding methods
        """Returns the feature's events for an output of vLLM. `finished` is True for the request's last output.

        `EngineRequest.sampled` already contains the output's tokens. The engine iterates over the events only as fast
        as the consumer accepts them.
        """
        return ()

    async def finish(self) -> AsyncGenerator[EngineEvent]:
        """Yields the feature's remaining events. Called after the request's last output."""
        none: tuple[EngineEvent, ...] = ()
        for event in none:
            yield event


class RequestFeature:
    """An extension of the vllm engine, such as media in prompts. By default, the methods do nothing.

    The engine calls `set_arguments`, `configure` and `start` once each, in this order. It calls `read_prompt`,
    `prepare` and `open` for each request, in this order, and `close` when the engine is closed.
    """

    runner_module: str | None = None
    """The name of a module with mixins for vLLM's model runners, or None if the feature has no mixins.

    The module contains the classes `RunnerV1` and `RunnerV2`. A worker adds one of these mixins to the class of an
    existing model runner. Therefore the mixins must not have an `__init__`.
    """
    llm: "AsyncLLM"
    """The running AsyncLLM. Set by `start`."""
    _stage: str

    def set_arguments(self, arguments: "AsyncEngineArgs") -> None:
        """Sets vLLM's engine arguments that the feature needs. Raises InvalidRequestError if the options
        conflict.
        """

    def configure(self, config: "VllmConfig") -> None:
        """Checks and changes vLLM's configuration before vLLM's engine is created.

        Raises InvalidRequestError if the model or the configuration does not support the feature.
        """

    async def start(self, llm: "AsyncLLM") -> None:
        """Prepares the feature. Called after vLLM has started and before the first request.

        A method that overrides this one must call it.
        """
        self.llm = llm

    async def read_prompt(self, task: Task, name: str, held: AsyncExitStack) -> RequestPrompt | None:  # noqa: ARG002
        """Returns the prompt of a task, or None if another feature or the engine must read the prompt.

        `name` is the request's id in vLLM. The feature adds callbacks to `held` that release the request's resources.
        """
        return None

    def completes(self, request: EngineRequest) -> bool:  # noqa: ARG002
        """Returns whether the request is complete without vLLM. It then has no outputs."""
        return False

    async def prepare(self, request: EngineRequest, held: AsyncExitStack) -> None:
        """Waits for what a checked request needs in addition to its prompt.

        The feature adds callbacks to `held` that release the request's resources.
        """

    def open(self, request: EngineRequest, held: AsyncExitStack) -> RequestHook | None:  # noqa: ARG002
        """Prepares a request. Called immediately before vLLM receives the request.

        Returns a hook that observes the request, or None if the feature does not observe the request. The feature adds
        callbacks to `held` that release the request's resources.
        """
        return None

    def _invalid(self, problem: str) -> InvalidRequestError:
        """Returns the error for an option of the stage that the feature does not accept."""
        return InvalidRequestError(f"stage {self._stage}: {problem}", reason="INVALID_OPTION")

    def close(self) -> None:
        """Releases all resources of the feature. Called after vLLM has shut down, possibly more than once."""


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
    """Updates `known`, a dict of the running requests' arguments of class `kind`, by request id.

    Adds the arguments of the step's new requests, and removes the arguments of finished requests.
    """
    for request_id in step.finished_req_ids:
        known.pop(request_id, None)
    for new in step.scheduled_new_reqs:
        if (argument := get_argument(new.sampling_params, kind)) is not None:
            known[new.req_id] = argument


def _key(kind: type[msgspec.Struct]) -> str:
    return f"stagemesh.{kind.__name__}"
