"""The roles of callers, as the API states them for each RPC, and the filter by which a port serves some roles alone."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager, suppress
from functools import lru_cache, partial
from typing import Any, NoReturn, TypeAlias

import grpc
from google.protobuf import descriptor_pool

from stagemesh.common.errors import PermissionDeniedError, StagemeshError, UnsupportedError
from stagemesh.rpc.handler_wrappers import abort, wrap_handler
from stagemesh.v1 import roles_pb2

Role: TypeAlias = "roles_pb2.CallerRole.ValueType"

CLIENT = roles_pb2.CALLER_ROLE_CLIENT
ORCHESTRATOR = roles_pb2.CALLER_ROLE_ORCHESTRATOR
STAGE = roles_pb2.CALLER_ROLE_STAGE
OPERATOR = roles_pb2.CALLER_ROLE_OPERATOR

_RECEIVE_S = 0.2
"""The time for which the requests of a rejected call are received, in seconds."""
_OPEN = ("/grpc.health.", "/grpc.reflection.")
"""The services that any caller may use."""


@lru_cache(maxsize=256)
def roles_of(method: str) -> frozenset[Role]:
    """Returns the roles that may call an RPC, given its path ("/stagemesh.v1.StageService/Describe").

    Returns an empty set for an RPC that is not part of the API, for example a health check.
    """
    try:
        found = descriptor_pool.Default().FindMethodByName(method.removeprefix("/").replace("/", "."))
    except KeyError:
        return frozenset()
    return frozenset(found.GetOptions().Extensions[roles_pb2.caller_roles])


Authenticate: TypeAlias = Callable[[Any, Any], Awaitable[frozenset[Role]]]
"""A function that returns the roles of a caller. Its arguments are the RPC's context and metadata.

Raises UnauthenticatedError if the caller has no valid credentials. Stores the caller's identity for the RPC.
"""


class RoleFilter(grpc.aio.ServerInterceptor):
    """Rejects every RPC that none of a port's roles may call, or whose caller has none of these roles.

    A port without authentication knows only the first rule, and RPCs that are not part of the API pass. With
    authentication, these are for operators. Health checks and reflection always pass.
    """

    def __init__(self, roles: Collection[Role], authenticate: Authenticate | None = None) -> None:
        """`authenticate` determines the roles of callers, or is None if the port cannot authenticate them."""
        self._roles = frozenset(roles)
        self._authenticate = authenticate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method = handler_call_details.method
        allowed = roles_of(method)
        if allowed and not allowed & self._roles:
            return _refusing(_other_port_error(method, allowed, self._roles))
        handler = await continuation(handler_call_details)
        if handler is None or self._authenticate is None or method.startswith(_OPEN):
            return handler
        return _guarded(handler, partial(self._authorize, self._authenticate, handler_call_details, allowed))

    async def _authorize(
        self, authenticate: Authenticate, details: grpc.HandlerCallDetails, allowed: frozenset[Role], context: Any
    ) -> None:
        """Raises UnauthenticatedError or PermissionDeniedError (WRONG_ROLE) if the caller may not call the RPC."""
        roles = await authenticate(context, details.invocation_metadata)
        needed = allowed & self._roles or frozenset({OPERATOR})
        if not roles & needed:
            name = details.method.rpartition("/")[2]
            raise PermissionDeniedError(
                f"{name} is for {_names(needed)}, and the caller's credentials are those of {_names(roles)}; use "
                "other credentials",
                reason="WRONG_ROLE",
            )


def _guarded(handler: Any, authorize: Callable[[Any], Awaitable[None]]) -> Any:
    """Returns a handler that calls `authorize` with the context of each RPC, and then does what `handler` does."""

    @asynccontextmanager
    async def guarded(request: Any, context: Any) -> AsyncGenerator[Any]:
        try:
            await authorize(context)
        except StagemeshError as exc:
            await _refuse(exc, request if handler.request_streaming else None, context)
        yield request

    return wrap_handler(handler, guarded)


def _refusing(error: StagemeshError) -> Any:
    """Returns a handler that ends each RPC with `error`."""

    async def refuse(requests: AsyncIterator[bytes], context: Any) -> None:
        await _refuse(error, requests, context)

    make_handler: Any = grpc.stream_stream_rpc_method_handler
    return make_handler(refuse)


async def _refuse(error: StagemeshError, requests: AsyncIterator[Any] | None, context: Any) -> NoReturn:
    """Ends an RPC with `error`. `requests` are the messages of its caller, or None if there is only one."""
    if requests is not None:
        # If the call ends while the client sends, the client may report INTERNAL instead of the status.
        with suppress(TimeoutError):
            async with asyncio.timeout(_RECEIVE_S):
                async for _ in requests:
                    pass
    await abort(context, error)


def _other_port_error(method: str, allowed: Collection[Role], served: Collection[Role]) -> UnsupportedError:
    return UnsupportedError(
        f"this port serves {_names(served)}, and {method.rpartition('/')[2]} is for {_names(allowed)}; call "
        "the server's other port (`admin_listen`; with `stagemesh up`, the next port after the one for clients)"
    )


def _names(roles: Collection[Role]) -> str:
    names = (roles_pb2.CallerRole.Name(role).removeprefix("CALLER_ROLE_").lower() for role in sorted(roles))
    return " and ".join(f"{name}s" for name in names)
