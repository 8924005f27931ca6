"""grpc.health.v1 with a name for each facet, set without waiting.

grpc_health's own asyncio servicer can be set only from a coroutine; signal handlers and state changes cannot wait.
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
    """The statuses of a server's facets; "" stands for the whole."""

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _Response.NOT_SERVING}
        self._changed = asyncio.Event()
        self._ended = False

    def set(self, service: str, *, serving: bool) -> None:
        """Changes a facet and tells who watches it; ignored once everything has ended."""
        if not self._ended:
            self._statuses[service] = _Response.SERVING if serving else _Response.NOT_SERVING
            self._wake()

    def end(self) -> None:
        """Sets every facet NOT_SERVING for good and ends all watches."""
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
            await context.abort(grpc.StatusCode.NOT_FOUND, f"no facet {request.service!r} here")
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
