"""Interceptors of the gRPC server: their base class, and the roles that a port serves."""

import asyncio
import time
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Iterable
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager, suppress
from functools import partial
from inspect import isasyncgenfunction
from typing import Any, NoReturn, TypeAlias

import grpc

from stagemesh.common.errors import PermissionDeniedError, StagemeshError, UnsupportedError
from stagemesh.rpc.callers import OPERATOR, Role, roles_of
from stagemesh.rpc.error_mapping import to_status
from stagemesh.v1 import roles_pb2

Metadata: TypeAlias = Iterable[tuple[str, str | bytes]] | None
"""The headers of an RPC."""

Around: TypeAlias = Callable[[Any, Any], AbstractAsyncContextManager[Any]]
"""A function of an RPC's argument (its message, or an iterator of them) and of its context.

Returns the context manager in which the RPC is served. It yields the argument for the wrapped handler.
"""


def wrap_handler(handler: Any, around: Around, *, receives_stream: bool = False) -> Any:
    """Returns a handler that serves each RPC as `handler` does, within the context manager of `around`.

    With `receives_stream`, the argument of `around` is an iterator of messages, even if the RPC has only one.
    """
    answers = "stream" if handler.response_streaming else "unary"
    serve = getattr(handler, f"{_kind(handler.request_streaming)}_{answers}")

    async def answer(request: Any, context: Any) -> Any:
        async with around(request, context) as given:
            return await serve(given, context)

    async def generate(request: Any, context: Any) -> AsyncGenerator[Any]:
        async with around(request, context) as given, aclosing(serve(given, context)) as responses:
            async for response in responses:
                yield response

    streams = receives_stream or handler.request_streaming
    served = {f"{_kind(streams)}_{answers}": generate if isasyncgenfunction(serve) else answer}
    return handler._replace(request_streaming=streams, **served)


async def abort(context: Any, error: StagemeshError) -> NoReturn:
    """Ends an RPC with the status of an error."""
    status = to_status(error)
    await context.abort(status.code, status.details, status.trailing_metadata)
    raise AssertionError("gRPC's `abort` raises")


def _kind(is_stream: bool) -> str:
    return "stream" if is_stream else "unary"


class RejectedBytes:
    """Counts the bytes of rejected messages by caller. Each caller may send 8 MiB/s of them, and 32 MiB at once.

    A rejected message costs its sender nothing, but takes time from all callers: at this rate, about a twentieth.
    A caller that has sent more waits for at most 4 s: others may use the same credentials.
    """

    _BYTES_A_SECOND, _AT_ONCE_S, _MAX_IDLE = 8 << 20, 4.0, 1024

    def __init__(self) -> None:
        self._paid_s: dict[str, float] = {}
        """The time from which nothing of the caller counts any longer. Earlier times are removed now and then."""

    def over_s(self, caller: str) -> float:
        """Returns the time for which a caller must not send messages, in seconds. 0 or less if it may."""
        return self._paid_s.get(caller, 0.0) - time.monotonic() - self._AT_ONCE_S

    def add(self, caller: str, size_bytes: int) -> None:
        """Counts bytes for a caller."""
        now_s = time.monotonic()
        if len(self._paid_s) > self._MAX_IDLE:
            self._paid_s = {name: paid_s for name, paid_s in self._paid_s.items() if paid_s > now_s}
        paid_s = max(self._paid_s.get(caller, 0.0), now_s) + size_bytes / self._BYTES_A_SECOND
        self._paid_s[caller] = min(paid_s, now_s + 2 * self._AT_ONCE_S)


_RECEIVE_S = 0.2
"""The time for which the requests of a rejected call are received, in seconds."""
_OPEN = ("/grpc.health.", "/grpc.reflection.")
"""The services that any caller may use."""


Authenticate: TypeAlias = Callable[[Any, Any], Awaitable[frozenset[Role]]]
"""A function that returns the roles of a caller. Its arguments are the RPC's context and metadata.

Raises UnauthenticatedError if the caller has no valid credentials. Stores the caller's identity for the RPC.
"""


class Interceptor(grpc.aio.ServerInterceptor):
    """Base class of interceptors that reject RPCs before their messages are parsed, and wrap other RPCs' handlers.

    The last interceptor, MessageLimits, parses messages. The others receive them as an iterator of bytes.
    """

    def __init__(self) -> None:
        self._rejected = RejectedBytes()

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        error = self._refusal(handler_call_details)
        if error is not None:
            make_handler: Any = grpc.stream_stream_rpc_method_handler
            return make_handler(partial(self._reject, error))
        handler = await continuation(handler_call_details)
        return None if handler is None else self._wrapped(handler, handler_call_details)

    def _refusal(self, _details: grpc.HandlerCallDetails) -> StagemeshError | None:
        """Returns the error with which an RPC ends before its handler is called, or None."""
        return None

    @abstractmethod
    def _wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        """Returns the handler to use instead of `handler`, which may be the same."""

    async def _reject(self, error: StagemeshError, requests: AsyncIterator[bytes], context: Any) -> NoReturn:
        """Ends an RPC with `error`. `requests` are the messages of its caller, none of which has been received."""
        # If the call ends while the client sends, the client may report INTERNAL instead of the status.
        with suppress(TimeoutError):
            async with asyncio.timeout(_RECEIVE_S):
                while self._rejected.over_s("") <= 0 and (data := await anext(aiter(requests), None)) is not None:
                    self._rejected.add("", len(data))
        await abort(context, error)


class RoleFilter(Interceptor):
    """Rejects every RPC that none of a port's roles may call, or whose caller has none of these roles.

    A port without authentication knows only the first rule, and RPCs that are not part of the API pass. With
    authentication, these are for operators. Health checks and reflection always pass.
    """

    def __init__(self, roles: Collection[Role], authenticate: Authenticate | None = None) -> None:
        """`authenticate` determines the roles of callers, or is None if the port cannot authenticate them."""
        super().__init__()
        self._roles = frozenset(roles)
        self._authenticate = authenticate

    def _refusal(self, details: grpc.HandlerCallDetails) -> StagemeshError | None:
        allowed = roles_of(details.method)
        if not allowed or allowed & self._roles:
            return None
        return UnsupportedError(
            f"this port serves {_names(self._roles)}, and {details.method.rpartition('/')[2]} is for "
            f"{_names(allowed)}; call the server's other port (`admin_listen`; with `stagemesh up`, the next port "
            "after the one for clients)"
        )

    def _wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:
        if self._authenticate is None or details.method.startswith(_OPEN):
            return handler
        return wrap_handler(handler, partial(self._authorized, self._authenticate, details))

    @asynccontextmanager
    async def _authorized(
        self, authenticate: Authenticate, details: grpc.HandlerCallDetails, requests: AsyncIterator[bytes], context: Any
    ) -> AsyncGenerator[Any]:
        """Ends an RPC if its caller may not call it. Otherwise yields `requests`."""
        try:
            self._check_roles(await authenticate(context, details.invocation_metadata), details.method)
        except StagemeshError as exc:
            await self._reject(exc, requests, context)
        yield requests

    def _check_roles(self, roles: frozenset[Role], method: str) -> None:
        """Raises PermissionDeniedError (WRONG_ROLE) if a caller with these roles may not call an RPC."""
        needed = roles_of(method) & self._roles or frozenset({OPERATOR})
        if not roles & needed:
            raise PermissionDeniedError(
                f"{method.rpartition('/')[2]} is for {_names(needed)}, and the caller's credentials are those of "
                f"{_names(roles)}; use other credentials",
                reason="WRONG_ROLE",
            )


def _names(roles: Collection[Role]) -> str:
    names = (roles_pb2.CallerRole.Name(role).removeprefix("CALLER_ROLE_").lower() for role in sorted(roles))
    return " and ".join(f"{name}s" for name in names)
