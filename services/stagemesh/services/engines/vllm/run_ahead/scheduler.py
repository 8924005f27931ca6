"""vLLM's schedulers, extended to stop each request at its limit while the rest of the batch continues.

A request at its limit remains in the running queue and retains its cache blocks, like a request whose next token is
still being sampled. vLLM's scheduler reads the number of tokens to compute from each request. A limited request reports
at most its limit.
"""

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakValueDictionary

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.core import EngineCore
from vllm.v1.request import Request, RequestStatus

from stagemesh.services.engines.vllm.extra_arguments import get_argument
from stagemesh.services.engines.vllm.run_ahead.limit import StartLimit

CORE_METHOD = "stagemesh_set_limits"
"""The name of the method that the schedulers add to vLLM's engine core to receive new limits."""
_NOT_YET_RUNNING = frozenset({RequestStatus.WAITING, RequestStatus.PREEMPTED})


class LimitedRequest(Request):
    """A request with a run-ahead limit.

    vLLM creates the object as a plain Request, and the scheduler then changes its class. Therefore this class has no
    `__init__`.
    """

    limit: int

    @property
    def num_tokens(self) -> int:
        """The number of prompt tokens and sampled tokens.

        While the request is waiting or preempted, the number is at most the limit.
        """
        known = len(self._all_token_ids)
        return min(known, self.limit) if self.status in _NOT_YET_RUNNING else known

    @property
    def num_tokens_with_spec(self) -> int:
        """The number of tokens up to which vLLM computes a running request, including draft tokens.

        vLLM adds `num_output_placeholders` to this number. The sum is at most the limit.
        """
        return min(len(self._all_token_ids) + len(self.spec_token_ids), self.limit - self.num_output_placeholders)

    @property
    def parked(self) -> bool:
        """Whether the request is running but cannot continue until its limit is raised."""
        return self.status == RequestStatus.RUNNING and self.num_computed_tokens >= self.limit


class LimitsRequests:
    """A mixin for vLLM's schedulers that enforces the run-ahead limits of requests."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limited: WeakValueDictionary[str, LimitedRequest] = WeakValueDictionary()
        # The engine core has no other interface through which the replica could reach its scheduler.
        setattr(EngineCore, CORE_METHOD, _set_limits)

    def add_request(self, request: Request) -> None:
        """Adds a request to the scheduler. Limits the request if it has a StartLimit argument."""
        start = get_argument(request.sampling_params, StartLimit)
        if start is not None:
            limited = cast("LimitedRequest", request)
            limited.__class__ = LimitedRequest
            limited.limit = start.position
            self._limited[start.name] = limited
        super().add_request(request)  # type: ignore[misc]

    def get_num_unfinished_requests(self) -> int:
        """Returns the number of unfinished requests that are not parked at their limit.

        The engine core sleeps while the number is 0. A new limit wakes the core.
        """
        unfinished: int = cast("Any", super()).get_num_unfinished_requests()
        return max(0, unfinished - sum(request.parked for request in self._limited.values()))

    def set_limits(self, limits: Sequence[Sequence[Any]]) -> list[str]:
        """Increases the limits of requests. `limits` contains (request name, token position) pairs.

        Returns the names of unknown requests. A position below a request's present limit has no effect.
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
    """A scheduler with run-ahead limits that schedules a step after the previous step has ended."""


class LimitingAsyncScheduler(LimitsRequests, AsyncScheduler):
    """A scheduler with run-ahead limits that schedules a step while the previous step runs."""


def _set_limits(core: EngineCore, limits: list[Any]) -> list[str]:
    return cast("LimitsRequests", core.scheduler).set_limits(limits)
