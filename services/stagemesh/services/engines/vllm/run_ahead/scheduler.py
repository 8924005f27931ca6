"""vLLM's schedulers, which compute a request no further than its replica allows; the batch goes on without it.

A request at its limit stays where it is and keeps its blocks, as one does whose next token is still being sampled.
vLLM asks each request how many tokens it has, and is told of no more than may be computed.
"""

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

import msgspec
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from stagemesh.services.engines.vllm.run_ahead.limits import LIMIT_ARGUMENT, UTILITY, Limit

_NOT_YET_RUNNING = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})


class LimitedRequest(Request):
    """A request with a limit; made of a plain one, so it has no `__init__`."""

    limit: int

    @property
    def num_tokens(self) -> int:
        """Those that may be computed, to the code that lets a request in; else all that are known."""
        known = len(self._all_token_ids)
        return min(known, self.limit) if self.status in _NOT_YET_RUNNING else known

    @property
    def num_tokens_with_spec(self) -> int:
        """Asked of running requests, and taken together with `num_output_placeholders`."""
        return min(len(self._all_token_ids) + len(self.spec_token_ids), self.limit - self.num_output_placeholders)

    @property
    def parked(self) -> bool:
        """Whether it waits for its limit alone."""
        return self.status == RequestStatus.RUNNING and self.num_computed_tokens >= self.limit


class LimitsRequests:
    """Mixed into vLLM's schedulers."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limited: WeakValueDictionary[str, LimitedRequest] = WeakValueDictionary()

    def add_request(self, request: Request) -> None:
        """Notes the limit with which a request begins."""
        extra = request.sampling_params.extra_args if request.sampling_params else None
        if extra and LIMIT_ARGUMENT in extra:
            limit = msgspec.convert(extra[LIMIT_ARGUMENT], Limit)
            limited = cast("LimitedRequest", request)
            limited.__class__ = LimitedRequest
            limited.limit = limit.position
            self._limited[limit.name] = limited
        super().add_request(request)  # type: ignore[misc]

    def get_num_unfinished_requests(self) -> int:
        """Without those that are parked: the core sleeps when there are no others, and is woken by a new limit."""
        unfinished: int = cast("Any", super()).get_num_unfinished_requests()
        return max(0, unfinished - sum(request.parked for request in self._limited.values()))

    def allow(self, limits: Sequence[Sequence[Any]]) -> list[str]:
        """Moves limits, (name, position) each; returns the names that it does not know."""
        unknown: list[str] = []
        for name, position in limits:
            request = self._limited.get(name)
            if request is None:
                unknown.append(name)
            else:
                request.limit = max(request.limit, position)
        return unknown


class LimitingScheduler(LimitsRequests, Scheduler):
    """For an engine that schedules one step after the other."""


class LimitingAsyncScheduler(LimitsRequests, AsyncScheduler):
    """For an engine that schedules a step while the one before runs."""


def offer() -> None:
    """Gives the engine core the method by which a replica moves limits."""
    setattr(EngineCore, UTILITY, _allow)


def _allow(core: EngineCore, limits: list[Any]) -> list[str]:
    return cast("LimitsRequests", core.scheduler).allow(limits)
