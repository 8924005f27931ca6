"""The interceptor of every gRPC server: which RPCs a port serves, their callers, and the receipt of their messages."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from functools import partial
from inspect import isasyncgenfunction
from typing import Any, NoReturn, TypeAlias

import grpc

from stagemesh.common.errors import (
    Code,
    InvalidRequestError,
    OverloadedError,
    PermissionDeniedError,
    StagemeshError,
    UnsupportedError,
)
from stagemesh.rpc.call_limits import Messages, RejectedBytes
from stagemesh.rpc.callers import OPERATOR, Identity, Role, roles_of, set_identity
from stagemesh.rpc.channels import MAX_HEADER_BYTES
from stagemesh.rpc.error_mapping import to_status
from stagemesh.v1 import roles_pb2

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]] | None
"""The headers of an RPC."""

Authenticate: TypeAlias = Callable[[Any, Metadata], Awaitable[Identity]]
"""A function that returns the identity of a caller. Its arguments are the RPC's context and metadata.

Raises UnauthenticatedError if the caller has no valid credentials.
"""

_Around: TypeAlias = Callable[[AsyncIterator[bytes], Any], AbstractAsyncContextManager[Any]]
"""A function of an RPC's messages and of its context.

Returns the context manager in which the RPC is served. It yields the argument for the wrapped handler.
"""

_OPEN = ("/grpc.health.", "/grpc.reflection.")
"""The services that any caller may use."""
_MOST_OPEN = 256
"""The number of calls of these services that one caller may have running."""
_RETRY_AFTER_S = 1.0
_RECEIVE_S = 0.2
"""The time for which the messages of a rejected call are received, in seconds."""
_HOSTS = 8
"""The number of callers whose rejected messages are received at the full rate of `RejectedBytes` at the same time."""
_ALL = ""
_FAULTS = {Code.INVALID_ARGUMENT, Code.ALREADY_EXISTS, Code.PERMISSION_DENIED, Code.UNIMPLEMENTED}
"""The codes of errors that are due to the caller's message. The others may be due to the state of the service."""


class Gate(grpc.aio.ServerInterceptor):
    """Rejects the RPCs that a port does not serve or that exceed a limit, and receives the messages of the others.

    - Headers: gRPC itself limits their size only on connections whose peer has acknowledged its settings.
    - Roles: an RPC must be for one of the port's roles, and for one of the caller's if the port authenticates callers.
      RPCs that are not part of the API are then for operators. Health checks and reflection always pass.
    - Running RPCs: gRPC itself limits the RPCs of a connection, but a caller can open many connections. An RPC counts
      from its headers on, although its message may never arrive.
    - Messages: a handler that receives a stream is passed `Messages`, or gRPC's iterator if its messages remain bytes.
      A message for which an RPC ends with an error that is due to it counts for its caller (`RejectedBytes`).
    """

    def __init__(
        self, roles: Collection[Role], authenticate: Authenticate | None = None, *, calls_per_caller: int | None
    ) -> None:
        """`authenticate` determines the identity of callers, or is None if the port cannot authenticate them.

        `calls_per_caller` is the number of calls, or None for no limit.
        """
        self._roles, self._authenticate, self._most = frozenset(roles), authenticate, calls_per_caller
        self._running = Counter[str]()
        self._rejected, self._drained = RejectedBytes(), RejectedBytes()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        try:
            self._check_headers(handler_call_details)
        except StagemeshError as exc:
            make_handler: Any = grpc.stream_stream_rpc_method_handler
            return make_handler(partial(self._refuse, exc))
        handler = await continuation(handler_call_details)
        return None if handler is None else _wrapped(handler, partial(self._admitted, handler, handler_call_details))

    def _check_headers(self, details: grpc.HandlerCallDetails) -> None:
        """Raises OverloadedError (HEADERS_TOO_LARGE) or UnsupportedError if the RPC is not served on this port."""
        headers: Metadata = details.invocation_metadata
        if sum(len(name) + len(value) for name, value in headers or ()) > MAX_HEADER_BYTES:
            raise OverloadedError(
                f"the headers of the call exceed {MAX_HEADER_BYTES} bytes; send fewer or shorter ones",
                reason="HEADERS_TOO_LARGE",
            )
        allowed = roles_of(details.method)
        if allowed and not allowed & self._roles:
            raise UnsupportedError(
                f"this port serves {_names(self._roles)}, and {details.method.rpartition('/')[2]} is for "
                f"{_names(allowed)}; call the server's other port (`admin_listen`; with `stagemesh up`, the next port "
                "after the one for clients)"
            )

    @asynccontextmanager
    async def _counted(self, context: Any, *, is_open: bool = False) -> AsyncGenerator[None]:
        """Counts an RPC of its caller within the block. Ends the RPC if its caller has too many.

        Health checks and reflection (`is_open`) count apart from the others, and have a limit at every port.
        """
        caller, most = (f"{_caller(context)} open", _MOST_OPEN) if is_open else (_caller(context), self._most)
        self._running[caller] += 1
        try:
            if most is not None and self._running[caller] > most:
                error = OverloadedError(
                    f"the caller has {most} running calls, which is the most that this service accepts; end some, and "
                    "retry",
                    reason="CALL_LIMIT",
                    retry_after_s=_RETRY_AFTER_S,
                )
                await _abort(context, error)
            yield
        finally:
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]

    async def _refuse(self, error: StagemeshError, requests: AsyncIterator[bytes], context: Any) -> None:
        """Ends an RPC that this port does not serve."""
        async with self._counted(context):
            await self._reject(error, requests, context)

    @asynccontextmanager
    async def _admitted(
        self, handler: Any, details: grpc.HandlerCallDetails, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncGenerator[Any]:
        """Ends an RPC if its caller may not call it, or has too many. Otherwise yields the argument of `handler`."""
        is_open = details.method.startswith(_OPEN)
        async with self._counted(context, is_open=is_open):
            caller = str(next(iter(context.auth_context().get("peer_uri", ())), context.peer()))
            if self._authenticate is not None and not is_open:
                try:
                    identity = await self._authenticate(context, details.invocation_metadata)
                    set_identity(identity)
                    caller = str(identity.names[0])
                    self._check_roles(identity.roles, details.method)
                except StagemeshError as exc:
                    await self._reject(exc, requests, context)
            async with self._received(handler, requests, context, caller) as given:
                yield given

    def _check_roles(self, roles: frozenset[Role], method: str) -> None:
        """Raises PermissionDeniedError (WRONG_ROLE) if a caller with these roles may not call an RPC."""
        needed = roles_of(method) & self._roles or frozenset({OPERATOR})
        if not roles & needed:
            raise PermissionDeniedError(
                f"{method.rpartition('/')[2]} is for {_names(needed)}, and the caller's credentials have the roles of "
                f"{_names(roles)}; use other credentials",
                reason="WRONG_ROLE",
            )

    async def _reject(self, error: StagemeshError, requests: AsyncIterator[bytes], context: Any) -> NoReturn:
        """Ends an RPC with `error`. `requests` are the messages of its caller, none of which has been received."""
        # If the call ends while the client sends, the client may report INTERNAL instead of the status.
        caller, drained = _caller(context), self._drained
        with suppress(TimeoutError):
            async with asyncio.timeout(_RECEIVE_S):
                while max(drained.over_s(caller), drained.over_s(_ALL)) <= 0:
                    data = await anext(aiter(requests), None)
                    if data is None:
                        break
                    drained.add(caller, len(data))
                    drained.add(_ALL, len(data) // _HOSTS)
        await _abort(context, error)

    @asynccontextmanager
    async def _received(
        self, handler: Any, requests: AsyncIterator[bytes], context: Any, caller: str
    ) -> AsyncGenerator[Any]:
        """Yields the argument of `handler`. Counts the messages that are rejected within the block for `caller`."""
        parse = handler.request_deserializer
        if parse is None and handler.request_streaming:
            yield requests
            return
        kind = None if parse is None else parse.__self__
        messages = Messages(requests, kind, self._rejected, caller)
        try:
            given = messages if handler.request_streaming else await anext(messages, None)
            if given is None:
                raise InvalidRequestError("the call has no message; send one", reason="MALFORMED_MESSAGE")
            yield given
        except (grpc.aio.AbortError, StagemeshError) as exc:
            error = exc if isinstance(exc, StagemeshError) else exc.__context__
            if isinstance(error, StagemeshError) and error.code in _FAULTS:
                messages.reject()
            if isinstance(exc, StagemeshError):
                await _abort(context, exc)
            raise


def _wrapped(handler: Any, around: _Around) -> Any:
    """Returns a handler that serves each RPC as `handler` does, within the context manager of `around`."""
    answers = "stream" if handler.response_streaming else "unary"
    serve = getattr(handler, f"{'stream' if handler.request_streaming else 'unary'}_{answers}")

    async def answer(requests: AsyncIterator[bytes], context: Any) -> Any:
        async with around(requests, context) as given:
            return await serve(given, context)

    async def generate(requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[Any]:
        async with around(requests, context) as given, aclosing(serve(given, context)) as responses:
            async for response in responses:
                yield response

    served = {f"stream_{answers}": generate if isasyncgenfunction(serve) else answer}
    return handler._replace(request_streaming=True, request_deserializer=None, **served)


async def _abort(context: Any, error: StagemeshError) -> NoReturn:
    """Ends an RPC with the status of an error."""
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("gRPC's `abort` raises")


def _caller(context: Any) -> str:
    """Returns the first name in the caller's certificate, or else its host."""
    for uri in context.auth_context().get("peer_uri", ()):
        return str(uri)
    return str(context.peer()).rpartition(":")[0]


def _names(roles: Collection[Role]) -> str:
    names = (roles_pb2.CallerRole.Name(role).removeprefix("CALLER_ROLE_").lower() for role in sorted(roles))
    return " and ".join(f"{name}s" for name in names)
