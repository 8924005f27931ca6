"""The border of every RPC: errors become statuses here, and nowhere else."""

import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing, asynccontextmanager
from functools import wraps
from typing import Any, Protocol, TypeVar, cast

import grpc

from stagemesh.connectors.errors import DeadlineError, InternalError, StagemeshError
from stagemesh.connectors.status import to_grpc_code, to_trailing_metadata
from stagemesh.services.serving.logs import bind_log_context

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


@asynccontextmanager
async def answering(context: RpcContext, **where: str) -> AsyncGenerator[None]:
    """Wraps the body of an RPC: log lines carry `where`, and what it raises becomes a status with one ErrorInfo.

    An error that is no StagemeshError is a fault of ours: it is logged with its traceback, and the caller
    hears INTERNAL.
    """
    bind_log_context(**where)
    try:
        yield
    except (grpc.aio.AbortError, grpc.aio.UsageError):
        raise
    except Exception as exc:  # noqa: BLE001
        error = to_error(exc, where)
        await context.abort(to_grpc_code(error), error.message, to_trailing_metadata(error))


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
    encoded = message.encode()
    if len(encoded) <= _MAX_MESSAGE_BYTES:
        return message
    return encoded[: _MAX_MESSAGE_BYTES - 4].decode(errors="ignore") + "…"
