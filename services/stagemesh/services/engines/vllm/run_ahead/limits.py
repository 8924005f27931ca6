"""How far requests may be computed: the replica's end. `limiting` is the scheduler's."""

import asyncio
import logging
from typing import TYPE_CHECKING, cast

import msgspec

from stagemesh.common.errors import StagemeshError
from stagemesh.services.engines.vllm.core_calls import core_call

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

LIMIT_ARGUMENT = "stagemesh_limit"
"""Under this name a request's `SamplingParams.extra_args` hold a `Limit`, as builtins."""
UTILITY = "stagemesh_allow"
"""The engine core's method that moves limits."""
UNLIMITED = 1 << 40
AHEAD_TOKENS = 256
"""How far a request is computed ahead of a consumer that is slow to take what it emits."""

_RETRY_S = 0.005

_log = logging.getLogger(__name__)


class Limit(msgspec.Struct, frozen=True):
    """The positions of a request before `position` may be computed."""

    name: str
    position: int


class RequestLimit:
    """One request's limit. It only grows."""

    def __init__(self, limits: "Limits", name: str) -> None:
        self.name = name
        self._limits = limits
        self._fed, self._ahead = UNLIMITED, UNLIMITED

    @property
    def position(self) -> int:
        """Positions before it may be computed: they have been fed, and are not too far ahead of what was taken."""
        return min(self._fed, self._ahead)

    def feed(self, position: int) -> None:
        """The rows before `position` are there."""
        self._move(position, self._ahead)

    def take(self, position: int) -> None:
        """What came of the positions before `position` has been taken: only so many more are computed ahead of it."""
        ahead = position + AHEAD_TOKENS
        # Not for every token: the core is told.
        if self._ahead == UNLIMITED or ahead - self._ahead >= AHEAD_TOKENS // 2:
            self._move(self._fed, ahead)

    def begin(self, params: "SamplingParams") -> None:
        """Tells the scheduler with the request itself; from now on changes are sent."""
        limit = msgspec.to_builtins(Limit(self.name, self.position))
        params.extra_args = {**(params.extra_args or {}), LIMIT_ARGUMENT: limit}
        self._limits.begun(self)

    def _move(self, fed: int, ahead: int) -> None:
        before = self.position
        self._fed, self._ahead = fed, ahead
        if self.position != before:
            self._limits.moved(self)


class Limits:
    """Those of an engine's requests. What moves within one turn of the event loop is sent at once."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm = llm
        self._begun: dict[str, RequestLimit] = {}
        self._moved: dict[str, RequestLimit] = {}
        self._sending: asyncio.Task[None] | None = None

    def open(self, name: str) -> RequestLimit:
        """For a request that is yet to begin; without a limit at first."""
        return RequestLimit(self, name)

    def begun(self, limit: RequestLimit) -> None:
        """See `RequestLimit.begin`."""
        self._begun[limit.name] = limit

    def forget(self, name: str) -> None:
        """The request is over."""
        self._begun.pop(name, None)
        self._moved.pop(name, None)

    def moved(self, limit: RequestLimit) -> None:
        """See `RequestLimit`; nothing for one that has not begun."""
        if limit.name not in self._begun:
            return
        self._moved[limit.name] = limit
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="limits")

    async def _send(self) -> None:
        try:
            while self._moved:
                moved, self._moved = self._moved, {}
                unknown = await self._tell([(name, limit.position) for name, limit in moved.items()])
                # Not there yet, or over; which of the two is known here.
                if early := {name: self._begun[name] for name in unknown if name in self._begun}:
                    self._moved |= early
                    await asyncio.sleep(_RETRY_S)
        except StagemeshError:
            # The requests are failed by whoever watches the engine.
            _log.exception("limits cannot be told to vLLM's engine core")
        finally:
            self._sending = None

    async def _tell(self, limits: list[tuple[str, int]]) -> list[str]:
        """Returns the names that the scheduler does not know."""
        call = cast("Coroutine[object, object, list[str]]", self._llm.engine_core.call_utility_async(UTILITY, limits))
        return await core_call(self._llm, call)
