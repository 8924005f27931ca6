"""Wraps RPC handlers: turns their errors into statuses, binds the log context and ends response streams."""

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from functools import wraps
from types import TracebackType
from typing import Any, Protocol, TypeVar, cast

import grpc

from stagemesh.common.errors import DeadlineError, InternalError, StagemeshError
from stagemesh.common.logs import bind_log_context
from stagemesh.rpc.error_mapping import to_grpc_code, to_trailing_metadata

_log = logging.getLogger(__name__)

# A status is sent in HTTP/2 trailers, twice with its message, and gRPC may reject trailers of 8 KiB or more.
_MAX_STATUS_MESSAGE_BYTES = 1024

Servicer = TypeVar("Servicer")
Request = TypeVar("Request")
Response = TypeVar("Response")
Handler = TypeVar("Handler", bound=Callable[..., AsyncIterator[Any]])


class RpcContext(Protocol):
    """The part of grpc.aio.ServicerContext that ends and bounds an RPC."""

    def abort(self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()) -> Awaitable[Any]:
        """Ends the RPC with a status."""
        ...

    def time_remaining(self) -> float | None:
        """Returns the seconds left to the deadline, or None if there is none."""
        ...


def answering(context: RpcContext, **where: str) -> AbstractAsyncContextManager[None]:
    """Wraps the body of an RPC: its log lines have `where`, and its errors become a status with one ErrorInfo.

    An error that is not a StagemeshError is a bug: it is logged with its traceback, and the caller receives INTERNAL.
    """
    return _Answering(context, where)


class _Answering(AbstractAsyncContextManager[None]):
    def __init__(self, context: RpcContext, where: Mapping[str, str]) -> None:
        self._context, self._where = context, where

    async def __aenter__(self) -> None:
        bind_log_context(**self._where)

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if not isinstance(exc, Exception) or isinstance(exc, grpc.aio.AbortError | grpc.aio.UsageError):
            return
        error = to_error(exc, self._where)
        status = to_grpc_code(error), error.message, to_trailing_metadata(error)
        # gRPC keeps the exception of `abort` until the next call, and with it the exception being handled. Its
        # traceback is removed, because its frames reference all objects of the request.
        exc.__traceback__ = None
        del kind, exc, traceback, error
        await self._context.abort(*status)


def to_error(exc: Exception, where: Mapping[str, str]) -> StagemeshError:
    """Returns the error to report for an exception that ended a call. Logs an unexpected exception.

    Call it while the exception is being handled.
    """
    if isinstance(exc, StagemeshError):
        error = exc.located(**where)
    else:
        _log.exception("a call failed unexpectedly")
        message = f"an unexpected {type(exc).__name__}; the service's log at this time has the details"
        error = InternalError(message, metadata=where)
    error.message = _shortened(error.message)
    return error


def streaming(method: Handler) -> Handler:
    """Decorates a method that yields responses, so that its generator is closed when the call ends.

    grpc.aio leaves the generator to the garbage collector if the caller disconnects. This decorator closes it in the
    RPC's own task before that task ends, so that its `finally` runs at once.
    """

    @wraps(method)
    async def write_responses(servicer: object, request: object, context: Any) -> None:
        generator = cast("Any", method(servicer, request, context))
        async with aclosing(generator) as responses:
            async for response in responses:
                await context.write(response)
                # The response may be large, and the next one may take long.
                del response

    return cast("Handler", write_responses)


def time_left_s(context: RpcContext) -> float | None:
    """Returns the seconds until the caller's deadline, or None if there is none. Raises DeadlineError if it passed."""
    return checked_time_left_s(context.time_remaining())


def checked_time_left_s(left_s: float | None) -> float | None:
    """Returns `left_s`. Raises DeadlineError if it is not positive."""
    if left_s is not None and not left_s > 0:
        raise DeadlineError("the deadline had passed before the call was read; allow more time")
    return left_s


def _shortened(message: str) -> str:
    # A path that is not UTF-8 has characters that cannot be sent.
    encoded = message.encode(errors="replace")
    if len(encoded) <= _MAX_STATUS_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[: _MAX_STATUS_MESSAGE_BYTES - 4].decode(errors="ignore") + "…"
