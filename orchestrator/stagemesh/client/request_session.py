"""One request on its way, over as many calls as it takes: what both clients do but for the calls themselves."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import grpc

from stagemesh.client.events import Event
from stagemesh.client.position import ClientPosition
from stagemesh.client.retries import Attempts, RetryPolicy
from stagemesh.common.errors import NotFoundError, StagemeshError, UnavailableError
from stagemesh.v1 import orchestrator_pb2

# What gRPC itself reports where the peer or the way to it broke.
_BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
)


class Call(NamedTuple):
    """A call to be made."""

    endpoint: int
    """Its number among the client's."""
    request: orchestrator_pb2.GenerateRequest
    timeout_s: float | None


ITERATED_TWICE = "a generation is iterated once, by `result()` too; call `generate` again for another"


class RequestSession:
    """Says which call comes next, and what of its answers is new."""

    def __init__(
        self,
        request: orchestrator_pb2.GenerateRequest,
        *,
        policy: RetryPolicy,
        timeout_s: float | None,
        endpoints: int,
        first: int,
    ) -> None:
        self._attempts = Attempts(policy, timeout_s=timeout_s, endpoints=endpoints)
        self._delivery = ClientPosition(request, policy)
        self._endpoints, self._endpoint = endpoints, first
        self._runs = False

    def begin(self) -> Call:
        """The next call; raises DeadlineError when there is no time left for it."""
        self._runs = False
        timeout_s = self._attempts.begin()
        return Call(self._endpoint, self._delivery.request(), timeout_s)

    def take(self, response: orchestrator_pb2.GenerateResponse) -> Event | None:
        """The event in `response`; None for one that the caller is not to hear."""
        event = self._delivery.take(response)
        if response.WhichOneof("event") != "queued":
            self._runs = True
            self._attempts.note_answer(is_new=event is not None)
        return event

    def pause_s(self, error: StagemeshError, *, broken: bool) -> float | None:
        """How long to wait before the next call, after this one failed; None where the request has."""
        pause_s = self._attempts.pause_s(error, broken=broken)
        if self._runs or broken:
            self._delivery.note_lost()
        if broken or isinstance(error, UnavailableError):
            self._endpoint = (self._endpoint + 1) % self._endpoints
        return pause_s


def code_of(error: grpc.RpcError) -> grpc.StatusCode:
    """The code of a call that failed."""
    assert isinstance(error, grpc.Call), "gRPC raises calls"
    return error.code()


def is_broken(code: grpc.StatusCode, error: StagemeshError, *, peer: str) -> bool:
    """Whether a call ended because the peer or the way to it broke: what a service itself says names no peer."""
    return code in _BROKEN and error.metadata.get("peer") == peer


def order(first: int, endpoints: int) -> Iterator[int]:
    """The numbers of all endpoints, from one on."""
    return ((first + number) % endpoints for number in range(endpoints))


def leads_on(code: grpc.StatusCode, error: StagemeshError, *, peer: str, anywhere: bool) -> bool:
    """Whether the next endpoint may say something else than this one, which is out of reach or knows nothing."""
    return is_broken(code, error, peer=peer) or (anywhere and isinstance(error, NotFoundError))


def surest(errors: Sequence[StagemeshError]) -> StagemeshError:
    """What to tell a caller whom no endpoint could help: that one knows nothing, before that one is out of reach."""
    return next((error for error in errors if isinstance(error, NotFoundError)), errors[0])
