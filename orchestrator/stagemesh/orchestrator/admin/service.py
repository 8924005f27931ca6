"""Serves AdminService on a separate port, and forwards StageControlService calls to replicas."""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, cast

import grpc

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.admin.servicer import AdminServicer
from stagemesh.orchestrator.fleet.replica_client import CONTROL_NAME
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.rpc.handlers import answering, time_left_s
from stagemesh.rpc.server import Server
from stagemesh.v1 import admin_pb2, admin_pb2_grpc

SERVICE_NAME = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
LIVENESS = "liveness"
REPLICA_KEY = "stagemesh-replica"
"""The metadata key that names the replica to which a StageControlService call is forwarded."""

_MAX_CALL_S = 3600.0
# The methods that are not forwarded. Their replacements in AdminService also consider the stage's other replicas.
_REPLACED_BY = {"Drain": "DrainReplicas", "Resume": "ResumeReplicas", "Shutdown": "RestartReplicas"}


@asynccontextmanager
async def serving_admin(orchestrator: Orchestrator, listen: str) -> AsyncGenerator[int]:
    """Serves AdminService within the block. Yields the port. All health checks report SERVING."""
    server = Server(listen)
    directory = Directory(orchestrator.pipeline, orchestrator.fleet)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(orchestrator, directory), server.grpc)
    server.grpc.add_generic_rpc_handlers((_ControlForwarder(directory),))
    for service in (SERVICE_NAME, CONTROL_NAME):
        server.reflect(service)
    for facet in ("", SERVICE_NAME, CONTROL_NAME, LIVENESS):
        server.set_health(facet, serving=True)
    port = await server.start()
    try:
        yield port
    finally:
        await server.stop(grace_s=0)


class _ControlForwarder(grpc.GenericRpcHandler):
    """Forwards each StageControlService call to the replica named in the call's metadata. Does not parse messages."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        service, _, method = handler_call_details.method.removeprefix("/").partition("/")
        if service != CONTROL_NAME:
            return None
        forward: Callable[..., Any] = partial(self._forward, method)
        return cast("Any", grpc.unary_unary_rpc_method_handler(forward))

    async def _forward(self, method: str, request: bytes, context: Any) -> bytes:
        metadata: Sequence[tuple[str, str | bytes]] = context.invocation_metadata() or ()
        name = next((str(value) for key, value in metadata if key == REPLICA_KEY), "")
        async with answering(context, **({"replica": name} if name else {})):
            if not name:
                raise InvalidRequestError(
                    f"the call does not name a replica; add its name to the metadata with the key {REPLICA_KEY!r}",
                    reason="NO_TARGET",
                )
            if method in _REPLACED_BY:
                raise UnsupportedError(f"{method} is not forwarded; call AdminService.{_REPLACED_BY[method]}")
            replica = self._directory.replica(name)
            left_s = time_left_s(context)
            return await replica.client.control(method, request, timeout_s=_MAX_CALL_S if left_s is None else left_s)
        raise AssertionError("answering ends every call that fails")
