"""The calls of a client: the order of the endpoints, the calls of each request, their spans and their errors."""

import asyncio
import sys
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Generic, Self, TypedDict, TypeVar, Unpack

import grpc

from stagemesh.client.received_events import ClientPosition
from stagemesh.client.responses import Event
from stagemesh.client.retries import Attempts, RetryPolicy
from stagemesh.common.errors import (
    CancelledRequestError,
    NotFoundError,
    StagemeshError,
    UnavailableError,
    UnsupportedError,
)
from stagemesh.common.wire.versions import UNKNOWN_KIND
from stagemesh.rpc.credentials import PROCESS, Credentials
from stagemesh.rpc.error_mapping import from_rpc_error, is_broken
from stagemesh.v1 import orchestrator_pb2

Headers = tuple[tuple[str, str], ...]


@contextmanager
def request_span(name: str, attributes: Mapping[str, str]) -> Generator[Headers]:
    """Opens a span for a request until the end of the block. Yields the headers that name the span in its calls.

    If the program has not imported OpenTelemetry, or does not record spans, there is no span and there are no headers.
    """
    if "opentelemetry" not in sys.modules:
        yield ()
        return
    from opentelemetry import propagate, trace

    span = trace.get_tracer("stagemesh.client").start_span(name, kind=trace.SpanKind.CLIENT, attributes=attributes)
    carrier: dict[str, str] = {}
    propagate.inject(carrier, trace.set_span_in_context(span))
    try:
        yield tuple(carrier.items())
    except StagemeshError as exc:
        span.set_status(trace.StatusCode.ERROR, exc.message)
        raise
    finally:
        span.end()


_LEFT_EARLY = (GeneratorExit, KeyboardInterrupt, asyncio.CancelledError)


class ClientOptions(TypedDict, total=False):
    """The options of a client. Without `tls`, its connections are not encrypted.

    A missing, damaged or unsuitable file raises InvalidRequestError (INVALID_TLS, INVALID_TOKENS).
    """

    retry_policy: RetryPolicy
    """The policy by which the client repeats failed calls."""
    tls: Path | str
    """A folder with the file `ca.crt`: the certificates of the authorities that sign the certificates of servers.

    It also has `tls.crt` and `tls.key`, the client's own certificate and its key, unless the client has a token.
    """
    token: str
    """The client's token."""
    token_file: Path | str
    """A file with the client's token. The client reads it for each call."""


class BaseClient:
    """Base class of the clients. Stores the endpoints of one pipeline and the running requests.

    A subclass implements `_connect` and `_send_leave`.
    """

    def __init__(self, *endpoints: str, **options: Unpack[ClientOptions]) -> None:
        """Connects to the endpoints, the "host:port" of one orchestrator each."""
        if not endpoints:
            raise ValueError("a client needs at least one endpoint")
        tls, token, token_file = options.get("tls"), options.get("token"), options.get("token_file")
        self.credentials = PROCESS.credentials
        """The certificates and the token of the client: by default those of this process."""
        if tls is not None or token is not None or token_file is not None:
            self.credentials = Credentials(tls, token=token, token_file=token_file, needs_certificate=False)
        self._certificates = [self.credentials.version] * len(endpoints)
        """For each endpoint, the version of the certificates with which its channel was opened."""
        self.endpoints = endpoints
        self.retry_policy = options.get("retry_policy") or RetryPolicy()
        self.closed = False
        self.latest = 0
        """The index of the last called endpoint.

        New requests start with this endpoint, to avoid endpoints that failed.
        """
        self.running: set[RequestCalls] = set()

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
        broken = is_broken(failure, error, peer=peer)
        if broken:
            self.renew_certificates(endpoint)
        if not (broken or (anywhere and isinstance(error, NotFoundError))):
            raise error from failure
        return error

    def renew_certificates(self, endpoint: int) -> None:
        """Opens a new channel to an endpoint if the certificates have changed since the last channel was opened.

        Call this method when the connection to the endpoint is broken.
        """
        if self.credentials.version != self._certificates[endpoint]:
            self._certificates[endpoint] = self.credentials.version
            self._connect(endpoint)

    def _connect(self, endpoint: int) -> None:
        """Opens a new channel to an endpoint for the next calls. Running calls continue on their channel."""
        raise NotImplementedError

    def leave(self, calls: "RequestCalls") -> None:
        """Asks the server to stop a request whose caller has stopped reading before the last event."""
        # Without reattaching, the server stops a request as soon as its call ends.
        if not self.closed and self.retry_policy.reattach_s:
            request = orchestrator_pb2.CancelRequestRequest(request_id=calls.request_id, when_left=True)
            self._send_leave(calls.endpoint, request)

    def _leave_all(self) -> None:
        for calls in list(self.running):
            self.leave(calls)
        self.closed = True

    def _send_leave(self, endpoint: int, request: orchestrator_pb2.CancelRequestRequest) -> None:
        """Sends a CancelRequest call in the background.

        If the call fails, the server still stops the request after the number of seconds in the request's `linger_s`.
        """
        raise NotImplementedError


class CallSequence:
    """Calls to the orchestrators of a pipeline that continue each other. Decides when and where to call next."""

    def __init__(self, client: BaseClient, *, timeout_s: float | None) -> None:
        self.endpoint = self._next_endpoint = client.latest
        """The index of the endpoint that was called last, in the client's list of endpoints."""
        self._client = client
        self._attempts = Attempts(client.retry_policy, timeout_s=timeout_s, endpoints=len(client.endpoints))

    def begin_call(self) -> float | None:
        """Starts a call. Returns the call's timeout in seconds, or None if there is no timeout.

        Raises DeadlineError if the timeout has passed, and CancelledRequestError if the client is closed.
        """
        timeout_s = self._attempts.begin()
        if self._client.closed:
            raise CancelledRequestError("the client was closed", reason="CLIENT_CLOSED")
        self._client.latest = self.endpoint = self._next_endpoint
        return timeout_s

    def pause_s(self, failure: grpc.RpcError) -> float:
        """Records a failed call. Returns the number of seconds to wait before the next call.

        Raises the call's error if a further call cannot help.
        """
        peer = self._client.endpoints[self.endpoint]
        error = from_rpc_error(failure, peer=peer)
        broken = is_broken(failure, error, peer=peer)
        if broken:
            self._client.renew_certificates(self.endpoint)
        pause_s = self._attempts.pause_s(error, broken=broken)
        if pause_s is None or self._client.closed:
            raise error from failure
        if self._attempts.answered or broken:
            self._note_lost()
        if broken or isinstance(error, UnavailableError):
            self._next_endpoint = (self.endpoint + 1) % len(self._client.endpoints)
        return pause_s

    def _note_lost(self) -> None:
        """Records that a call ended which the orchestrator may have accepted."""
        raise NotImplementedError


class RequestCalls(CallSequence):
    """The calls of one request. Decides which received events are new to the caller.

    Use it as a context manager. If the block ends with GeneratorExit, KeyboardInterrupt, a cancellation, or an event of
    a kind that this client does not know, the server is asked to stop the request.
    """

    def __init__(
        self, client: BaseClient, request: orchestrator_pb2.GenerateRequest, *, timeout_s: float | None
    ) -> None:
        super().__init__(client, timeout_s=timeout_s)
        self.request_id = request.request_id
        self.headers: Headers = ()
        """The headers of the calls, which name the request's span in the caller's trace. Empty if there is none."""
        self.position = ClientPosition(request, client.retry_policy)
        self._span = ExitStack()

    def take(self, response: orchestrator_pb2.GenerateResponse) -> Sequence[Event]:
        """Returns the events in `response` that the caller does not have yet. Empty if their kind is unknown."""
        events = self.position.take(response)
        if response.WhichOneof("event") != "queued":
            self._attempts.note_answer(is_new=bool(events))
        return events

    def _note_lost(self) -> None:
        self.position.note_lost()

    def __enter__(self) -> Self:
        self._client.running.add(self)
        span = request_span("stagemesh.generate", {"stagemesh.request_id": self.request_id})
        self.headers = self._span.enter_context(span)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._client.running.discard(self)
        self._span.__exit__(kind, error, trace)
        if isinstance(error, _LEFT_EARLY) or (isinstance(error, UnsupportedError) and error.reason == UNKNOWN_KIND):
            self._client.leave(self)


ClientT = TypeVar("ClientT", bound=BaseClient)


class BaseResponseStream(Generic[ClientT]):
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

    def _begin_calls(self) -> RequestCalls:
        if self._is_begun:
            raise RuntimeError(
                "a response stream can be iterated only once, and `result()` iterates over it; call `generate` again "
                "to send another request"
            )
        self._is_begun = True
        return RequestCalls(self._client, self._request, timeout_s=self._timeout_s)


def main_error(errors: Sequence[StagemeshError]) -> StagemeshError:
    """Returns the first NotFoundError of failed calls to several endpoints, or the first error if there is none."""
    return next((error for error in errors if isinstance(error, NotFoundError)), errors[0])
