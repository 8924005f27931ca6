"""The session of a request with the orchestrators of one pipeline: its endpoints, retries and received position."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Generic, Self, TypeVar

import grpc
import grpc.aio

from stagemesh.client.event_decoder import EventDecoder
from stagemesh.client.responses import Admitted, Event, Finished, Progress, Queued
from stagemesh.common.backoff import backoff_s
from stagemesh.common.errors import (
    CancelledRequestError,
    DeadlineError,
    NotFoundError,
    StagemeshError,
    UnavailableError,
    UnsupportedError,
)
from stagemesh.common.output_position import Position
from stagemesh.common.unknown_kinds import UNKNOWN_KIND
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import orchestrator_pb2

# The codes that gRPC itself reports if the server or the connection to it breaks.
_BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
)
_LEFT_EARLY = (GeneratorExit, KeyboardInterrupt, asyncio.CancelledError)
# The reason that a stopping server reports. After a request has started, any other error is the end of the request.
_STOPPING = "NOT_RUNNING"
_LONGEST_SEARCH_PAUSE_S = 1.0
_MAX_LINGER_S = 10


@dataclass(frozen=True)
class RetryPolicy:
    """The limits on the retries of a request.

    Before a request runs, the client attempts it at most `attempts` times on each endpoint, and more often while no
    endpoint can be reached and `reach_s` seconds have not passed. The pause before the first retry is `first_pause_s`
    seconds. The pause doubles with each retry, up to `max_pause_s` seconds. If the server asks for another pause
    (RetryInfo), the client waits for that time. The request fails if the server asks for a pause longer than
    `max_asked_pause_s` seconds.

    The server of a running request can stop or become unreachable. The client then searches all endpoints for the
    request for at most `reattach_s` seconds. 0 disables the search. The request fails if its server becomes unavailable
    more than `attempts` times in a row and no new event arrives for `reattach_s` seconds.
    """

    attempts: int = 5
    first_pause_s: float = 0.1
    max_pause_s: float = 5.0
    max_asked_pause_s: float = 30.0
    reattach_s: float = 30.0
    reach_s: float = 0.0

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.first_pause_s <= 0 or self.max_pause_s < self.first_pause_s:
            raise ValueError(f"a retry policy requires attempts >= 1 and 0 < first_pause_s <= max_pause_s, not {self}")
        for name in ("max_asked_pause_s", "reattach_s", "reach_s"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")


class Attempts:
    """A counter of the calls that attempt one request, over all endpoints. Decides when the next attempt starts.

    No attempt exceeds the request's timeout.
    """

    def __init__(self, policy: RetryPolicy, *, timeout_s: float | None, endpoints: int = 1) -> None:
        self._policy, self._endpoints = policy, endpoints
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._reach_ends_s = time.monotonic() + policy.reach_s
        self._made = 0
        """The number of attempts since the server last became unavailable, or since the request's start."""
        self.answered = False
        """Whether the server's answer to the current attempt has shown that the request is running."""
        self._search_ends_s: float | None = None
        """The deadline of the search for the request's server, in seconds on the monotonic clock.

        None if the server has never been unavailable while the request was running.
        """
        self._losses = 0
        """The number of times that the server has become unavailable since the last new event."""
        self._last_new_event_s = time.monotonic()

    def begin(self) -> float | None:
        """Starts an attempt. Returns the attempt's timeout in seconds, or None if the request has no timeout.

        Raises DeadlineError if the request's timeout has passed.
        """
        self._made += 1
        self.answered = False
        left_s = self._left_s()
        if left_s is not None and left_s <= 0:
            raise DeadlineError("the timeout passed before the request was sent; increase timeout_s")
        return left_s

    def note_answer(self, *, is_new: bool) -> None:
        """Records that the server has sent an event, and that the request is therefore running.

        `is_new` is True if the caller had not received the event before.
        """
        self.answered = True
        if is_new:
            self._losses, self._last_new_event_s = 0, time.monotonic()

    def pause_s(self, error: StagemeshError, *, broken: bool = False) -> float | None:
        """Returns the pause in seconds before the next attempt, or None if the request has failed with `error`.

        Until the server has answered the current attempt, the client retries if the server is unreachable or states
        when to retry. After an answer, the client retries only if the connection is `broken` or if the server is
        stopping.
        """
        if self.answered:
            return self._pause_after_loss_s(error, broken=broken)
        searching = self._search_ends_s is not None
        # A server that stops ends calls that it has not accepted yet with CANCELLED.
        unreachable = broken or isinstance(error, UnavailableError)
        if error.retry_after_s is None and not unreachable:
            return None
        may_reach = unreachable and time.monotonic() < self._reach_ends_s
        if not searching and not may_reach and self._made >= self._policy.attempts * self._endpoints:
            return None
        if unreachable and self._made % self._endpoints:
            return self._if_in_time(0.0)
        asked_s = error.retry_after_s
        return self._if_in_time(self._backoff_s(self._made // self._endpoints) if asked_s is None else asked_s)

    def _pause_after_loss_s(self, error: StagemeshError, *, broken: bool) -> float | None:
        """Returns the pause in seconds before a running request is attempted again after its server became unavailable.

        Returns None if the request has failed.
        """
        if not broken and error.reason != _STOPPING:
            return None
        now_s, limit_s = time.monotonic(), self._policy.reattach_s
        self._made = 0
        self._search_ends_s = now_s + limit_s
        self._losses += 1
        exhausted = self._losses > self._policy.attempts and now_s - self._last_new_event_s > limit_s
        if exhausted or not limit_s:
            return None
        if self._losses > 1:
            return self._if_in_time(self._backoff_s(self._losses - 1))
        # Do not wait, because perhaps only the connection broke or another endpoint is ready.
        return self._if_in_time(0.0 if broken or self._endpoints > 1 else error.retry_after_s or 0.0)

    def _backoff_s(self, failures: int) -> float:
        longest_s = self._policy.max_pause_s if self._search_ends_s is None else _LONGEST_SEARCH_PAUSE_S
        return backoff_s(failures, first_s=self._policy.first_pause_s, longest_s=longest_s)

    def _if_in_time(self, pause_s: float) -> float | None:
        left_s = self._left_s()
        if left_s is not None and pause_s >= left_s:
            return None
        if self._search_ends_s is None:
            return pause_s if pause_s <= self._policy.max_asked_pause_s else None
        return pause_s if time.monotonic() + pause_s <= self._search_ends_s else None

    def _left_s(self) -> float | None:
        return None if self._deadline_s is None else self._deadline_s - time.monotonic()


class ClientPosition:
    """The client's position in the events of a request.

    Removes repeated events, and builds the request that asks for the remaining events.
    """

    def __init__(self, request: orchestrator_pb2.GenerateRequest, policy: RetryPolicy) -> None:
        self._request = orchestrator_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        self._request.linger_s = min(_MAX_LINGER_S, ceil(policy.reattach_s))
        self._received, self._decoder = Position(), EventDecoder()
        self._steps = Counter[tuple[str, int]]()
        self._admitted = False
        self._generation = ""
        """The generation in which the request runs."""
        self._is_finished = False

    def request(self) -> orchestrator_pb2.GenerateRequest:
        """Returns the request to send with the next call, which asks for the outputs that are still missing."""
        del self._request.next_positions[:]
        for (name, index), position in self._received.counts.items():
            self._request.next_positions.add(name=name, index=index, position=position)
        if self._received.counts:
            self._request.generation = self._generation
        return self._request

    def note_lost(self) -> None:
        """Records that a call ended before its request ended. The call may have started the request."""
        self._request.earlier_calls += 1

    def take(self, response: orchestrator_pb2.GenerateResponse) -> Sequence[Event]:
        """Returns the events in `response` that the caller does not have yet. Empty if their kind is unknown."""
        if response.HasField("admitted"):
            self._generation = response.admitted.generation
        if response.HasField("output"):
            rest = self._received.remainder(response.output)
            if rest is None:
                return ()
            response = orchestrator_pb2.GenerateResponse(output=rest, ignorable=response.ignorable)
        return tuple(filter(self._is_new, self._decoder.decode(response)))

    def _is_new(self, event: Event) -> bool:
        match event:
            case Queued() | Admitted() if self._admitted:
                # The request is queued or placed again. The caller has already received its start.
                return False
            case Admitted():
                self._admitted = True
                self._request.parameters.seed = event.seed
            case Progress():
                key = event.stage, event.index
                is_new = not self._request.earlier_calls or event.steps > self._steps[key]
                if is_new:
                    self._steps[key] = event.steps
                return is_new
            case Finished():
                # An orchestrator repeats it if the connection broke after it.
                is_new, self._is_finished = not self._is_finished, True
                return is_new
            case _:
                pass
        return True


class BaseClient:
    """Base class of the clients. Stores the endpoints of one pipeline and the running requests.

    A subclass implements `_send_leave`.
    """

    def __init__(self, *endpoints: str, retry_policy: RetryPolicy | None = None) -> None:
        if not endpoints:
            raise ValueError("a client needs at least one endpoint")
        self.endpoints = endpoints
        self.retry_policy = retry_policy or RetryPolicy()
        self.closed = False
        self.latest = 0
        """The index of the last called endpoint.

        New requests start with this endpoint, to avoid endpoints that failed.
        """
        self.running: set[RequestSession] = set()

    @property
    def endpoint(self) -> str:
        """The address of the endpoint that was called last, as "host:port"."""
        return self.endpoints[self.latest]

    def endpoints_in_turn(self) -> Iterator[int]:
        """Yields the index of each endpoint once, beginning with the endpoint that was called last."""
        return ((self.latest + offset) % len(self.endpoints) for offset in range(len(self.endpoints)))

    def error_of(self, failure: grpc.RpcError, *, endpoint: int, anywhere: bool) -> StagemeshError:
        """Returns the error of a failed unary call, so that the caller can try another endpoint.

        Raises the error instead if no other endpoint can help. Another endpoint can help if this endpoint is
        unreachable. If `anywhere` is True, another endpoint can also help if this endpoint reports NOT_FOUND.
        """
        peer = self.endpoints[endpoint]
        error = from_rpc_error(failure, peer=peer)
        if not (_is_broken(failure, error, peer=peer) or (anywhere and isinstance(error, NotFoundError))):
            raise error from failure
        return error

    def leave(self, session: "RequestSession") -> None:
        """Asks the server to stop a request whose caller has stopped reading before the last event."""
        # Without reattaching, the server stops a request as soon as its call ends.
        if not self.closed and self.retry_policy.reattach_s:
            request = orchestrator_pb2.CancelRequestRequest(request_id=session.request_id, when_left=True)
            self._send_leave(session.endpoint, request)

    def _leave_all(self) -> None:
        for session in list(self.running):
            self.leave(session)
        self.closed = True

    def _send_leave(self, endpoint: int, request: orchestrator_pb2.CancelRequestRequest) -> None:
        """Sends a CancelRequest call in the background.

        If the call fails, the server still stops the request after the number of seconds in the request's `linger_s`.
        """
        raise NotImplementedError


class RequestSession:
    """The calls of one request. Decides which endpoint to call next and which received events are new to the caller.

    Use the session as a context manager. If the block ends with GeneratorExit, KeyboardInterrupt, a cancellation, or an
    event of a kind that this client does not know, the session asks the server to stop the request.
    """

    def __init__(
        self, client: BaseClient, request: orchestrator_pb2.GenerateRequest, *, timeout_s: float | None
    ) -> None:
        self.request_id = request.request_id
        self.endpoint = self._next_endpoint = client.latest
        """The index of the endpoint that this request called last, in the client's list of endpoints."""
        self._client = client
        self._attempts = Attempts(client.retry_policy, timeout_s=timeout_s, endpoints=len(client.endpoints))
        self._position = ClientPosition(request, client.retry_policy)

    def begin_call(self) -> float | None:
        """Starts a call. Returns the call's timeout in seconds, or None if the request has no timeout.

        Raises DeadlineError if the request's timeout has passed, and CancelledRequestError if the client is closed.
        """
        timeout_s = self._attempts.begin()
        if self._client.closed:
            raise CancelledRequestError("the client was closed", reason="CLIENT_CLOSED")
        self._client.latest = self.endpoint = self._next_endpoint
        return timeout_s

    def request(self) -> orchestrator_pb2.GenerateRequest:
        """Returns the request to send with the next call, which asks for the outputs that are still missing."""
        return self._position.request()

    def take(self, response: orchestrator_pb2.GenerateResponse) -> Sequence[Event]:
        """Returns the events in `response` that the caller does not have yet. Empty if their kind is unknown."""
        events = self._position.take(response)
        if response.WhichOneof("event") != "queued":
            self._attempts.note_answer(is_new=bool(events))
        return events

    def pause_s(self, failure: grpc.RpcError) -> float:
        """Records a failed call. Returns the number of seconds to wait before the next call.

        Raises the call's error if a further call cannot help.
        """
        peer = self._client.endpoints[self.endpoint]
        error = from_rpc_error(failure, peer=peer)
        broken = _is_broken(failure, error, peer=peer)
        pause_s = self._attempts.pause_s(error, broken=broken)
        if pause_s is None or self._client.closed:
            raise error from failure
        if self._attempts.answered or broken:
            self._position.note_lost()
        if broken or isinstance(error, UnavailableError):
            self._next_endpoint = (self.endpoint + 1) % len(self._client.endpoints)
        return pause_s

    def __enter__(self) -> Self:
        self._client.running.add(self)
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._client.running.discard(self)
        if isinstance(error, _LEFT_EARLY) or (isinstance(error, UnsupportedError) and error.reason == UNKNOWN_KIND):
            self._client.leave(self)


ClientT = TypeVar("ClientT", bound=BaseClient)


class BaseGeneration(Generic[ClientT]):
    """A request and its events. The request is sent when the iteration over the events starts."""

    def __init__(self, client: ClientT, *, request: orchestrator_pb2.GenerateRequest, timeout_s: float | None) -> None:
        self._client = client
        self._request = request
        self._timeout_s = timeout_s
        self._is_begun = False

    @property
    def request_id(self) -> str:
        """The id that identifies the request in every service and log."""
        return self._request.request_id

    def _open_session(self) -> RequestSession:
        if self._is_begun:
            raise RuntimeError(
                "a generation can be iterated only once, and `result()` iterates over it; call `generate` again to "
                "send another request"
            )
        self._is_begun = True
        return RequestSession(self._client, self._request, timeout_s=self._timeout_s)


def main_error(errors: Sequence[StagemeshError]) -> StagemeshError:
    """Returns the error to raise after the calls to all endpoints have failed.

    Returns the first NotFoundError, or the first error if there is no NotFoundError.
    """
    return next((error for error in errors if isinstance(error, NotFoundError)), errors[0])


def _is_broken(failure: grpc.RpcError, error: StagemeshError, *, peer: str) -> bool:
    """Returns whether a call failed because the server terminated or the connection to the server broke.

    gRPC itself reports such a failure, so that the error's metadata names `peer`. An error that a service reports does
    not name `peer` in its metadata.
    """
    assert isinstance(failure, grpc.Call | grpc.aio.AioRpcError), "gRPC raises calls"
    return failure.code() in _BROKEN and error.metadata.get("peer") == peer
