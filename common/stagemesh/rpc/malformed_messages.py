"""Rejects messages that are not protobuf messages of their type. gRPC itself would answer with an internal error."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from stagemesh.common.errors import InvalidRequestError
from stagemesh.rpc.handler_wrappers import abort, wrap_handler


class Malformed:
    """Takes the place of a message that cannot be parsed. `context.read()` may return it."""

    def __init__(self, cause: DecodeError) -> None:
        self._cause = str(cause)

    def error(self) -> InvalidRequestError:
        """Returns the error for the sender of the message."""
        return InvalidRequestError(
            f"a message cannot be parsed: {self._cause}; send the messages of the protos", reason="MALFORMED_MESSAGE"
        )


class MalformedFilter(grpc.aio.ServerInterceptor):
    """Ends each RPC with INVALID_ARGUMENT (MALFORMED_MESSAGE) if one of its requests cannot be parsed.

    RPCs whose servicers read bytes are not concerned. A servicer that calls `context.read()` receives a `Malformed`.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        return handler if handler is None or handler.request_deserializer is None else _filtered(handler)


def _filtered(handler: Any) -> Any:
    parse = handler.request_deserializer

    def parse_if_possible(data: bytes) -> object:
        try:
            return parse(data)
        except DecodeError as exc:
            return Malformed(exc)

    @asynccontextmanager
    async def checked(request: Any, context: Any) -> AsyncGenerator[Any]:
        if isinstance(request, Malformed):
            await abort(context, request.error())
        yield _checked(request) if handler.request_streaming else request

    return wrap_handler(handler._replace(request_deserializer=parse_if_possible), checked)


async def _checked(requests: AsyncIterator[object]) -> AsyncGenerator[object]:
    """Yields the messages. Raises the error of the first that cannot be parsed."""
    async for request in requests:
        if isinstance(request, Malformed):
            raise request.error()
        yield request
