"""Limits how far vLLM computes requests ahead of their inputs and of their consumers."""

import asyncio
import logging
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING, cast

from stagemesh.common.errors import StagemeshError
from stagemesh.services.engines.vllm.core_calls import core_call
from stagemesh.services.engines.vllm.extra_arguments import set_argument
from stagemesh.services.engines.vllm.features import EngineRequest, RequestFeature
from stagemesh.services.engines.vllm.run_ahead.limit import UNLIMITED, RequestLimit, StartLimit
from stagemesh.services.engines.vllm.run_ahead.scheduler import CORE_METHOD, LimitingAsyncScheduler, LimitingScheduler

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from vllm.config import VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM

_RETRY_S = 0.005

_log = logging.getLogger(__name__)


class RunAhead(RequestFeature):
    """The request feature that sends the run-ahead limits of requests to vLLM's scheduler.

    This feature is the last in the engine's list, because the other features set a request's limit in `open`. Limits
    that change within one iteration of the event loop are sent together.
    """

    _llm: "AsyncLLM"

    def __init__(self) -> None:
        self._limits: dict[str, RequestLimit] = {}
        self._changed: set[str] = set()
        self._sending: asyncio.Task[None] | None = None

    def configure(self, config: "VllmConfig") -> None:
        asynchronous = bool(config.scheduler_config.async_scheduling)
        config.scheduler_config.scheduler_cls = LimitingAsyncScheduler if asynchronous else LimitingScheduler

    async def start(self, llm: "AsyncLLM") -> None:
        self._llm = llm

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
        """Sends limits to vLLM's scheduler. Returns the names of the requests that the scheduler does not know."""
        call = self._llm.engine_core.call_utility_async(CORE_METHOD, limits)
        return await core_call(self._llm, cast("Coroutine[object, object, list[str]]", call))
