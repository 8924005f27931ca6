"""Limits the calls of a caller: how many run at once, and the size of their headers."""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc

from stagemesh.common.errors import InvalidRequestError, OverloadedError, StagemeshError
from stagemesh.rpc.channels import MAX_HEADER_BYTES
from stagemesh.rpc.interceptors import Interceptor, Metadata, abort, wrap_handler

CALLS_PER_CALLER = 4096
_RETRY_AFTER_S = 1.0


class CallLimits(Interceptor):
    """Ends each RPC with RESOURCE_EXHAUSTED whose headers are too large, or whose caller has too many running RPCs.

    gRPC itself limits headers only on connections whose peer has acknowledged its settings, and it limits the calls of
    a connection, but not the calls of a caller, who can open many connections.

    A call counts from its headers on, although its request may never arrive. For this purpose, handlers of unary
    requests become handlers of streams, of which they receive the first message. The caller is the first name in the
    certificate, or else the host.
    """

    def __init__(self, calls_per_caller: int | None) -> None:
        """`calls_per_caller` is the number of calls, or None for no limit."""
        self._most = calls_per_caller
        self._running = Counter[str]()

    def _refusal(self, details: grpc.HandlerCallDetails) -> StagemeshError | None:
        headers: Metadata = details.invocation_metadata
        if sum(len(name) + len(value) for name, value in headers or ()) <= MAX_HEADER_BYTES:
            return None
        return OverloadedError(
            f"the headers of the call exceed {MAX_HEADER_BYTES} bytes; send fewer or shorter ones",
            reason="HEADERS_TOO_LARGE",
        )

    def _wrapped(self, handler: Any, details: grpc.HandlerCallDetails) -> Any:  # noqa: ARG002
        if self._most is None:
            return handler
        return wrap_handler(handler, partial(self._counted, handler, self._most), receives_stream=True)

    @asynccontextmanager
    async def _counted(
        self, handler: Any, most: int, requests: AsyncIterator[Any], context: Any
    ) -> AsyncGenerator[Any]:
        """Counts an RPC within the block, and ends it if its caller has too many. Yields the argument of `handler`."""
        caller = _caller(context)
        self._running[caller] += 1
        try:
            if self._running[caller] > most:
                error = OverloadedError(
                    f"the caller has {most} running calls, which is the most that this service accepts; end some, and "
                    "retry",
                    reason="CALL_LIMIT",
                    retry_after_s=_RETRY_AFTER_S,
                )
                await abort(context, error)
            yield requests if handler.request_streaming else await _read_message(requests, context)
        finally:
            self._running[caller] -= 1
            if not self._running[caller]:
                del self._running[caller]


async def _read_message(requests: AsyncIterator[Any], context: Any) -> Any:
    """Returns the only message of an RPC."""
    first = await anext(aiter(requests), None)
    if first is None:
        await abort(context, InvalidRequestError("the call has no message; send one", reason="MALFORMED_MESSAGE"))
    return first


def _caller(context: Any) -> str:
    for uri in context.auth_context().get("peer_uri", ()):
        return str(uri)
    return str(context.peer()).rpartition(":")[0]
