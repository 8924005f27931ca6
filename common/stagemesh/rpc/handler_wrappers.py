"""Handlers of interceptors: each contains another handler, and serves every RPC within a context manager."""

from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, aclosing
from inspect import isasyncgenfunction
from typing import Any, NoReturn, TypeAlias

from stagemesh.common.errors import StagemeshError
from stagemesh.rpc.error_mapping import to_status

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
