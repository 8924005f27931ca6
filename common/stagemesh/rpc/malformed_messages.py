"""Rejects messages that are not protobuf messages of their type. gRPC itself would answer with an internal error."""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from inspect import isasyncgenfunction
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from stagemesh.common.errors import InvalidRequestError
from stagemesh.rpc.error_mapping import to_status


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

    kind = f"{'stream' if handler.request_streaming else 'unary'}_{'stream' if handler.response_streaming else 'unary'}"
    serve = getattr(handler, kind)

    async def check(request: object, context: Any) -> None:
        if isinstance(request, Malformed):
            status = to_status(request.error())
            await context.abort(status.code, status.details, status.trailing_metadata)

    async def answer(request: Any, context: Any) -> Any:
        await check(request, context)
        return await serve(_checked(request) if handler.request_streaming else request, context)

    async def generate(request: Any, context: Any) -> AsyncGenerator[Any]:
        await check(request, context)
        given = _checked(request) if handler.request_streaming else request
        async with aclosing(serve(given, context)) as responses:
            async for response in responses:
                yield response

    serves = generate if isasyncgenfunction(serve) else answer
    return handler._replace(request_deserializer=parse_if_possible, **{kind: serves})


async def _checked(requests: AsyncIterator[object]) -> AsyncGenerator[object]:
    """Yields the messages. Raises the error of the first that cannot be parsed."""
    async for request in requests:
        if isinstance(request, Malformed):
            raise request.error()
        yield request
