"""The roles of callers, as the API states them for each RPC, and the filter by which a port serves only some roles."""

from collections.abc import Awaitable, Callable, Collection
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
    """Rejects every RPC of the API that none of a port's roles may call, with the code UNIMPLEMENTED.

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
            return None
        return await continuation(handler_call_details)
