"""A grpc.health.v1 servicer whose statuses can be set synchronously.

The asyncio servicer of grpc_health sets statuses in coroutines, which signal handlers and other synchronous code
cannot await.
"""

import asyncio
from collections.abc import AsyncIterator
from typing import TypeAlias

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagemesh.rpc.handlers import streaming

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_Request: TypeAlias = health_pb2.HealthCheckRequest
_Response: TypeAlias = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):
    """Serves the health status of each named service of a server. The name "" stands for the whole server."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _Response.NOT_SERVING}
        self._changed = asyncio.Event()
        self._ended = False

    def set(self, service: str, *, serving: bool) -> None:
        """Sets the health status of a service, and notifies the clients that watch the service.

        Does nothing after `end`.
        """
        if not self._ended:
            self._statuses[service] = _Response.SERVING if serving else _Response.NOT_SERVING
            self._wake()

    def end(self) -> None:
        """Sets the health status of all services to NOT_SERVING permanently, and ends all Watch calls."""
        self._statuses = dict.fromkeys(self._statuses, _Response.NOT_SERVING)
        self._ended = True
        self._wake()

    async def Check(  # noqa: N802
        self,
        request: _Request,
        context: "grpc.aio.ServicerContext[_Request, _Response]",
    ) -> _Response:
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown health service {request.service!r}")
        return _Response(status=status)

    @streaming
    async def Watch(  # noqa: N802
        self,
        request: _Request,
        context: "grpc.aio.ServicerContext[_Request, _Response]",  # noqa: ARG002
    ) -> AsyncIterator[_Response]:
        last: int | None = None
        while True:
            changed, ended = self._changed, self._ended
            status = self._statuses.get(request.service, _Response.SERVICE_UNKNOWN)
            if status != last:
                yield _Response(status=status)
            if ended:
                return
            last = status
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
