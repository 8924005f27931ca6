"""The interface of request features: capabilities that the vllm engine adds to requests, one folder each.

`VllmEngine` has a list of features and uses only this interface. This module does not import vLLM.
"""

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from stagemesh.services.engines.base import EngineEvent, Task
from stagemesh.services.engines.vllm.run_ahead.limit import RequestLimit

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    from stagemesh.services.engines.vllm.sampling import CheckedParams

RUNNER_MODULES = "stagemesh_runner_modules"
"""The key of vLLM's `additional_config` under which the features' runner modules are listed."""


@dataclass(frozen=True, eq=False)
class RequestPrompt:
    """A prompt in the form that vLLM accepts."""

    token_ids: list[int]
    """The prompt's token ids, with a placeholder token at each position that is not a token."""
    engine_input: Mapping[str, object] = field(default_factory=lambda: {"type": "token"})
    """vLLM's `EngineInput` without `prompt_token_ids`."""
    digest: bytes = b""
    """A digest of the content that `token_ids` do not represent, such as media. Empty if there is none."""


@dataclass
class EngineRequest:
    """A task while it runs in vLLM."""

    task: Task
    name: str
    """The request's id in vLLM, unique within the engine."""
    prompt: RequestPrompt
    params: "CheckedParams"
    """The sampling parameters. Features may change them in `open`."""
    sampled: list[int] = field(default_factory=list[int])
    """The tokens sampled so far, including the tokens of the checkpoint from which the task resumed."""
    limit: RequestLimit = field(default_factory=RequestLimit)
    """The limit on the positions that vLLM may compute."""

    @property
    def known_tokens(self) -> int:
        """The total number of prompt tokens and sampled tokens."""
        return len(self.prompt.token_ids) + len(self.sampled)

    @property
    def computed_tokens(self) -> int:
        """The number of positions that the model has computed. The last sampled token is not computed yet."""
        return self.known_tokens - 1


class RequestHook:
    """A feature's handler for one running request. The methods do nothing unless a feature overrides them."""

    def observe(self, *, finished: bool) -> Iterable[EngineEvent]:  # noqa: ARG002  # for the overriding methods
        """Returns the feature's events after an output of vLLM. `EngineRequest.sampled` already contains its tokens.

        The events are iterated as fast as the consumer accepts them. `finished` is True for vLLM's last output.
        """
        return ()

    async def finish(self) -> AsyncGenerator[EngineEvent]:
        """Yields the feature's remaining events after vLLM's last output."""
        none: tuple[EngineEvent, ...] = ()
        for event in none:
            yield event


class RequestFeature:
    """A capability that the engine adds to requests. The methods do nothing unless a feature overrides them.

    The engine calls `set_arguments`, `configure` and `start` once each, in this order. It calls `read_prompt` and
    `open` for each request, and `close` at the end.
    """

    runner_module: str | None = None
    """A module with the classes `RunnerV1` and `RunnerV2`, which workers mix into vLLM's model runners, or None.

    A worker adds them to the runner's class after vLLM has created the runner, so they have no `__init__`.
    """

    def set_arguments(self, arguments: "AsyncEngineArgs") -> None:
        """Sets the engine arguments that the feature needs. Raises InvalidRequestError if the options conflict."""

    def configure(self, config: "VllmConfig") -> None:
        """Checks and changes vLLM's configuration before the engine is created.

        Raises InvalidRequestError if the model or the configuration does not support the feature.
        """

    async def start(self, llm: "AsyncLLM") -> None:
        """Prepares the running engine for the feature's requests."""

    async def read_prompt(self, task: Task, name: str, held: AsyncExitStack) -> RequestPrompt | None:  # noqa: ARG002
        """Returns the prompt of a task if this feature reads it, or None if it does not.

        Resources of the request are released when `held` exits.
        """
        return None

    def open(self, request: EngineRequest, held: AsyncExitStack) -> RequestHook | None:  # noqa: ARG002
        """Prepares a request immediately before it enters vLLM.

        Returns the feature's hook, or None if the feature has no part in the running request.
        """
        return None

    def close(self) -> None:
        """Releases all resources after vLLM has shut down. May be called more than once."""
