"""Code that the asyncio and synchronous clients share: endpoints, the calls of a request, and their errors."""

import asyncio
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Generic, NamedTuple, Self, TypeVar

import grpc
import grpc.aio

from stagemesh.client.events import Event
from stagemesh.client.position import ClientPosition
from stagemesh.client.retries import Attempts, RetryPolicy
from stagemesh.common.errors import CancelledRequestError, NotFoundError, StagemeshError, UnavailableError
from stagemesh.rpc import channels
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import orchestrator_pb2

CONTROL_TIMEOUT_S = 10.0
LEAVE_TIMEOUT_S = 1.0

_PING_TIMEOUT = "grpc.http2.ping_timeout_ms"
CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    *(option for option in channels.CHANNEL_OPTIONS if option[0] != _PING_TIMEOUT),
    # The timeout is longer than between services, because client machines may be loaded and client links slow.
    (_PING_TIMEOUT, 2000),
)

# The codes that gRPC itself reports if the server or the connection to it breaks.
_BROKEN = frozenset(
    {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL}
)
_LEFT_EARLY = (GeneratorExit, KeyboardInterrupt, asyncio.CancelledError)


class BaseClient:
    """Base class of the clients. Records the endpoints of one pipeline and the requests that are running.

    A subclass implements `_send_leave`.
    """

    def __init__(self, *endpoints: str, retry_policy: RetryPolicy | None = None) -> None:
        if not endpoints:
            raise ValueError("a client needs at least one endpoint")
        self.endpoints = endpoints
        self.retry_policy = retry_policy or RetryPolicy()
        self.closed = False
        self.latest = 0
        """The index of the last called endpoint. New requests start with this endpoint, to avoid endpoints that failed.
        """
        self._running: dict[str, int] = {}

    @property
    def endpoint(self) -> str:
        """The endpoint that was called last, as "host:port"."""
        return self.endpoints[self.latest]

    def record_call(self, request_id: str, endpoint: int) -> None:
        """Records that a request is about to call the endpoint with this index.

        Raises CancelledRequestError if the client is closed.
        """
        if self.closed:
            raise CancelledRequestError("the client was closed")
        self.latest = self._running[request_id] = endpoint

    def release(self, request_id: str, *, left: bool) -> None:
        """Removes a request from the running requests.

        `left` is True if the caller stopped reading events before the end of the request. The server is then asked to
        stop the request.
        """
        endpoint = self._running.pop(request_id, None)
        if left and endpoint is not None:
            self._leave(request_id, endpoint)

    def _leave_all(self) -> None:
        for request_id, endpoint in list(self._running.items()):
            self._leave(request_id, endpoint)
        self.closed = True

    def _leave(self, request_id: str, endpoint: int) -> None:
        # Without reattaching, the server stops a request as soon as its call ends.
        if not self.closed and self.retry_policy.reattach_s:
            request = orchestrator_pb2.CancelRequestRequest(request_id=request_id, when_left=True)
            self._send_leave(endpoint, request)

    def _send_leave(self, endpoint: int, request: orchestrator_pb2.CancelRequestRequest) -> None:
        """Starts a CancelRequest call in the background.

        If the call fails, the server still stops the request after the number of seconds in the request's `linger_s`.
        """
        raise NotImplementedError


class EndpointSearch:
    """Iterates over the indexes of the endpoints, to find an endpoint that answers a unary call.

    The iteration starts with the endpoint in use. The caller reports each failed call with `record`.
    """

    def __init__(self, endpoints: Sequence[str], first: int, *, anywhere: bool) -> None:
        self._endpoints, self._first, self._anywhere = endpoints, first, anywhere
        self._errors: list[StagemeshError] = []

    def __iter__(self) -> Iterator[int]:
        return ((self._first + offset) % len(self._endpoints) for offset in range(len(self._endpoints)))

    def record(self, endpoint: int, failure: grpc.RpcError) -> None:
        """Records a failed call. Raises the call's error if a call to another endpoint cannot help.

        A call to another endpoint can help if this endpoint is unreachable. If `anywhere` is True, such a call can also
        help if this endpoint does not know the request.
        """
        peer = self._endpoints[endpoint]
        error = from_rpc_error(failure, peer=peer)
        self._errors.append(error)
        if not (_is_broken(failure, error, peer=peer) or (self._anywhere and isinstance(error, NotFoundError))):
            raise error from failure

    @property
    def error(self) -> StagemeshError:
        """The error to raise after all endpoints failed. NotFoundError takes precedence over unreachable endpoints."""
        return next((error for error in self._errors if isinstance(error, NotFoundError)), self._errors[0])


class Call(NamedTuple):
    """A Generate call to make. `endpoint` is an index in the client's list of endpoints.

    `timeout_s` is None if the call has no time limit.
    """

    endpoint: int
    request: orchestrator_pb2.GenerateRequest
    timeout_s: float | None


class RequestSession:
    """Decides which endpoint a request calls next, and which of the received events are new to the caller.

    Use the session as a context manager. If the block ends with GeneratorExit, KeyboardInterrupt or a cancellation, the
    session asks the server to stop the request.
    """

    def __init__(
        self, client: BaseClient, request: orchestrator_pb2.GenerateRequest, *, timeout_s: float | None
    ) -> None:
        self._client = client
        self._request_id = request.request_id
        self._attempts = Attempts(client.retry_policy, timeout_s=timeout_s, endpoints=len(client.endpoints))
        self._position = ClientPosition(request, client.retry_policy)
        self._endpoint = client.latest
        self._runs = False

    def next_call(self) -> Call:
        """Returns the next call to make. Raises DeadlineError if the request's timeout has passed.

        Raises CancelledRequestError if the client is closed.
        """
        self._runs = False
        timeout_s = self._attempts.begin()
        self._client.record_call(self._request_id, self._endpoint)
        return Call(self._endpoint, self._position.request(), timeout_s)

    def take(self, response: orchestrator_pb2.GenerateResponse) -> Event | None:
        """Returns the event in `response`, or None if the caller already has it or if its kind is unknown."""
        event = self._position.take(response)
        if response.WhichOneof("event") != "queued":
            self._runs = True
            self._attempts.note_answer(is_new=event is not None)
        return event

    def pause_s(self, failure: grpc.RpcError) -> float:
        """Records a failed call, and returns the number of seconds to wait before the next call.

        Raises the call's error if the request has failed, so that no further call can help.
        """
        peer = self._client.endpoints[self._endpoint]
        error = from_rpc_error(failure, peer=peer)
        broken = _is_broken(failure, error, peer=peer)
        pause_s = self._attempts.pause_s(error, broken=broken)
        if pause_s is None or self._client.closed:
            raise error from failure
        if self._runs or broken:
            self._position.note_lost()
        if broken or isinstance(error, UnavailableError):
            self._endpoint = (self._endpoint + 1) % len(self._client.endpoints)
        return pause_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.release(self._request_id, left=isinstance(error, _LEFT_EARLY))


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


def _is_broken(failure: grpc.RpcError, error: StagemeshError, *, peer: str) -> bool:
    """Returns whether a call failed because the server or the connection to the server broke.

    An error that a service itself reports does not name `peer` in its metadata.
    """
    assert isinstance(failure, grpc.Call | grpc.aio.AioRpcError), "gRPC raises calls"
    return failure.code() in _BROKEN and error.metadata.get("peer") == peer
