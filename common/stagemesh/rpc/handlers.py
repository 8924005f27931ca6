"""The border of every RPC: errors become statuses here, and nowhere else."""

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

# Statuses travel in HTTP/2 trailers, which gRPC may refuse from 8 KiB on; the message is in there twice.
_MAX_MESSAGE_BYTES = 1024

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
        """Seconds left to the deadline, None without one."""
        ...


def answering(context: RpcContext, **where: str) -> AbstractAsyncContextManager[None]:
    """Wraps the body of an RPC: log lines carry `where`, and what it raises becomes a status with one ErrorInfo.

    An error that is no StagemeshError is a fault of ours: it is logged with its traceback, and the caller
    hears INTERNAL.
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
        # gRPC keeps what `abort` raises until the next call, and with it what is being handled: the frames that this
        # came through, which hold all that a request has made, are not to be a part of that.
        exc.__traceback__ = None
        del kind, exc, traceback, error
        await self._context.abort(*status)


def to_error(exc: Exception, where: Mapping[str, str]) -> StagemeshError:
    """What a caller is told of an exception that ended its call; one that nobody foresaw is logged, being handled."""
    if isinstance(exc, StagemeshError):
        error = exc.located(**where)
    else:
        _log.exception("a call failed in a way that nobody foresaw")
        message = f"an unexpected {type(exc).__name__}; the service's log at this time has the details"
        error = InternalError(message, metadata=where)
    error.message = _shortened(error.message)
    return error


def streaming(method: Handler) -> Handler:
    """Makes a generator of responses end with its call.

    grpc.aio leaves a generator to the garbage collector when the caller hangs up; here it is closed in the RPC's
    own task before that ends, so that its `finally` runs at once.
    """

    @wraps(method)
    async def write_responses(servicer: object, request: object, context: Any) -> None:
        generator = cast("Any", method(servicer, request, context))
        async with aclosing(generator) as responses:
            async for response in responses:
                await context.write(response)
                # It may be large, and the next one far away.
                del response

    return cast("Handler", write_responses)


def time_left_s(context: RpcContext) -> float | None:
    """Seconds until the caller's deadline, None without one; raises DeadlineError when it has passed."""
    return checked_time_left_s(context.time_remaining())


def checked_time_left_s(left_s: float | None) -> float | None:
    """The same; raises DeadlineError where it is no time."""
    if left_s is not None and not left_s > 0:
        raise DeadlineError("the deadline had passed before the call was read; allow more time")
    return left_s


def _shortened(message: str) -> str:
    # A path that is no UTF-8 is text that cannot be sent.
    encoded = message.encode(errors="replace")
    if len(encoded) <= _MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[: _MAX_MESSAGE_BYTES - 4].decode(errors="ignore") + "…"
