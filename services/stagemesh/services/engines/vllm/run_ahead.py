"""The run-ahead feature, which limits how far vLLM computes a request ahead of its inputs and its consumer.

Mixins for vLLM's schedulers stop each request at its limit while the other requests of the batch continue. A request at
its limit remains in the running queue and retains its cache blocks, like a request whose next token is still being
sampled. vLLM's scheduler asks each request how many tokens to compute. A limited request returns at most its limit.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, Any, cast
from weakref import WeakValueDictionary

import msgspec
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from stagemesh.common.errors import StagemeshError
from stagemesh.services.engines.vllm.engine_core import core_call
from stagemesh.services.engines.vllm.features import EngineRequest, RequestFeature, get_argument, set_argument
from stagemesh.services.engines.vllm.run_ahead_limit import UNLIMITED, RequestLimit

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_RETRY_S = 0.005
_CORE_METHOD = "stagemesh_set_limits"
"""The name of a method of vLLM's engine core that accepts new limits. The scheduler mixin adds this method."""
_NOT_YET_RUNNING = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})

_log = logging.getLogger(__name__)


class StartLimit(msgspec.Struct, frozen=True):
    """The run-ahead limit of a request when the request starts.

    The replica sends this object to vLLM's scheduler with the request (`features.set_argument`).
    """

    name: str
    position: int
    """The limit: the first token position that vLLM must not compute yet."""


class LimitedRequest(Request):
    """A request with a run-ahead limit.

    vLLM creates the object as a plain Request. The scheduler then changes the object's class to this class. Therefore
    this class must not have an `__init__`.
    """

    limit: int

    @property
    def num_tokens(self) -> int:
        """The number of prompt tokens and sampled tokens. At most the limit if the request is waiting or
        preempted.
        """
        known = len(self._all_token_ids)
        return min(known, self.limit) if self.status in _NOT_YET_RUNNING else known

    @property
    def num_tokens_with_spec(self) -> int:
        """The number of tokens that vLLM may compute of a running request, including draft tokens.

        vLLM adds `num_output_placeholders` to this number. The result is at most the limit.
        """
        return min(len(self._all_token_ids) + len(self.spec_token_ids), self.limit - self.num_output_placeholders)

    @property
    def parked(self) -> bool:
        """Whether the request is running but cannot continue until its limit is increased."""
        return self.status == RequestStatus.RUNNING and self.num_computed_tokens >= self.limit


class LimitsRequests:
    """A mixin for vLLM's schedulers that enforces the run-ahead limits of requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limited: WeakValueDictionary[str, LimitedRequest] = WeakValueDictionary()
        # The engine core has no other interface through which the replica could reach its scheduler.
        setattr(EngineCore, _CORE_METHOD, _set_limits)

    def add_request(self, request: Request) -> None:
        """Adds a request to the scheduler. If the request has a StartLimit argument, applies this limit."""
        start = get_argument(request.sampling_params, StartLimit)
        if start is not None:
            limited = cast("LimitedRequest", request)
            limited.__class__ = LimitedRequest
            limited.limit = start.position
            self._limited[start.name] = limited
        super().add_request(request)  # type: ignore[misc]

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of unfinished requests, without the requests that are parked at their limit.

        The engine core sleeps while the number is 0. A call of `set_limits` wakes the core.
        """
        unfinished: int = cast("Any", super()).get_num_unfinished_requests()
        return max(0, unfinished - sum(request.parked for request in self._limited.values()))

    def set_limits(self, limits: Sequence[Sequence[Any]]) -> list[str]:
        """Increases the limits of requests. `limits` contains pairs of a request name and a token position.

        Returns the names of unknown requests. Ignores a position below the request's present limit.
        """
        unknown: list[str] = []
        for name, position in limits:
            request = self._limited.get(name)
            if request is None:
                unknown.append(name)
            else:
                request.limit = max(request.limit, position)
        return unknown


class LimitingScheduler(LimitsRequests, Scheduler):
    """A scheduler with run-ahead limits that schedules a step only after the previous step has ended."""


class LimitingAsyncScheduler(LimitsRequests, AsyncScheduler):
    """A scheduler with run-ahead limits that already schedules a step while the previous step runs."""


def _set_limits(core: EngineCore, limits: list[Any]) -> list[str]:
    return cast("LimitsRequests", core.scheduler).set_limits(limits)


class RunAhead(RequestFeature):
    """The request feature that sends the run-ahead limits of requests to vLLM's scheduler.

    This feature must be the last in the engine's list of features, because the other features set a request's limit in
    `open`. Limits that change within one iteration of the event loop are sent together.
    """

    def __init__(self) -> None:
        self._limits: dict[str, RequestLimit] = {}
        self._changed: set[str] = set()
        self._sending: asyncio.Task[None] | None = None

    def configure(self, config: "VllmConfig") -> None:
        asynchronous = bool(config.scheduler_config.async_scheduling)
        config.scheduler_config.scheduler_cls = LimitingAsyncScheduler if asynchronous else LimitingScheduler

    def open(self, request: EngineRequest, held: AsyncExitStack) -> None:
        if request.limit.position == UNLIMITED:
            return
        set_argument(request.params, StartLimit(request.name, request.limit.position))
        self._limits[request.name] = request.limit
        request.limit.on_change = partial(self._send_soon, request.name)
        held.callback(self._forget, request.name)

    # -- internals

    def _forget(self, name: str) -> None:
        self._limits.pop(name).on_change = None
        self._changed.discard(name)

    def _send_soon(self, name: str) -> None:
        self._changed.add(name)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="limits")

    async def _send(self) -> None:
        try:
            while self._changed:
                changed, self._changed = self._changed, set()
                unknown = await self._call_core([(name, self._limits[name].position) for name in changed])
                # The scheduler does not know requests that have not arrived or have ended. `_limits` omits ended ones.
                if early := {name for name in unknown if name in self._limits}:
                    self._changed |= early
                    await asyncio.sleep(_RETRY_S)
        except StagemeshError:
            # `VllmEngine.wait_failed` ends the requests if the engine core has terminated.
            _log.exception("cannot send limits to vLLM's engine core")
        finally:
            self._sending = None

    async def _call_core(self, limits: list[tuple[str, int]]) -> list[str]:
        """Sends limits to vLLM's scheduler. Returns the names of requests that are unknown to the scheduler.

        `limits` contains pairs of a request name and a token position.
        """
        call = self.llm.engine_core.call_utility_async(_CORE_METHOD, limits)
        return await core_call(self.llm, cast("Coroutine[object, object, list[str]]", call))
