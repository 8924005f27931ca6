"""The roles of callers, as the API states them for each RPC, and the filter by which a port serves only some roles."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection
from contextlib import suppress
from functools import lru_cache
from typing import Any, TypeAlias

import grpc
from google.protobuf import descriptor_pool

from stagemesh.v1 import roles_pb2

Role: TypeAlias = "roles_pb2.CallerRole.ValueType"

CLIENT = roles_pb2.CALLER_ROLE_CLIENT
ORCHESTRATOR = roles_pb2.CALLER_ROLE_ORCHESTRATOR
STAGE = roles_pb2.CALLER_ROLE_STAGE
OPERATOR = roles_pb2.CALLER_ROLE_OPERATOR

_RECEIVE_S = 0.2
"""The time for which the requests of a rejected call are received, in seconds."""


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


class RoleFilter(grpc.aio.ServerInterceptor):
    """Rejects every RPC of the API that none of a port's roles may call, with the code UNIMPLEMENTED and a remedy.

    RPCs that are not part of the API, such as health checks, pass.
    """

    def __init__(self, roles: Collection[Role]) -> None:
        self._roles = frozenset(roles)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        allowed = roles_of(handler_call_details.method)
        if allowed and not allowed & self._roles:
            make_handler: Any = grpc.stream_stream_rpc_method_handler
            return make_handler(self._refusal(handler_call_details.method, allowed))
        return await continuation(handler_call_details)

    def _refusal(self, method: str, allowed: Collection[Role]) -> Callable[[Any, Any], AsyncGenerator[Any]]:
        text = (
            f"this port serves {_names(self._roles)}, and {method.rpartition('/')[2]} is for {_names(allowed)}; call "
            "the server's other port (`admin_listen`; with `stagemesh up`, the next port after the one for clients)"
        )

        async def refuse(requests: AsyncIterator[bytes], context: Any) -> AsyncGenerator[Any]:
            # If the call ends while the client sends, the client may report INTERNAL instead of the status.
            with suppress(TimeoutError):
                async with asyncio.timeout(_RECEIVE_S):
                    async for _ in requests:
                        pass
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, text)
            yield

        return refuse


def _names(roles: Collection[Role]) -> str:
    names = (roles_pb2.CallerRole.Name(role).removeprefix("CALLER_ROLE_").lower() for role in sorted(roles))
    return " and ".join(f"{name}s" for name in names)
