"""Helpers for RPC handlers: errors, log context, response generators, and methods with serialized messages."""

import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, aclosing
from functools import wraps
from typing import Any, TypeAlias, TypeVar, cast

import grpc

from stagemesh.common.errors import DeadlineError, InternalError, StagemeshError
from stagemesh.common.process.logs import bind_log_context
from stagemesh.rpc.error_mapping import to_status
from stagemesh.v1 import stage_pb2, stage_pb2_grpc

_log = logging.getLogger(__name__)
_STAGE_SERVICE: str = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name

Servicer = TypeVar("Servicer")
Handler = TypeVar("Handler", bound=Callable[..., AsyncIterator[Any]])


Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
"""The context of an RPC with messages of any type."""


def answering(context: Context, **where: str) -> AbstractAsyncContextManager[None]:
    """Returns a context manager for the body of an RPC handler.

    The context manager adds `where` to the log records of the body. If the body raises an error, the context manager
    ends the RPC with the error's gRPC status. An error that is not a StagemeshError is a defect: the error is logged
    with its traceback, and the caller receives the code INTERNAL.
    """
    return _Answering(context, where)


class _Answering(AbstractAsyncContextManager[None]):
    def __init__(self, context: Context, where: Mapping[str, str]) -> None:
        self._context, self._where = context, where

    async def __aenter__(self) -> None:
        bind_log_context(**self._where)

    async def __aexit__(self, kind: object, exc: BaseException | None, traceback: object) -> None:
        if not isinstance(exc, Exception) or isinstance(exc, grpc.aio.AbortError | grpc.aio.UsageError):
            return
        error = to_error(exc, self._where)
        status = to_status(error)
        # gRPC retains the exception that `abort` raises until the next call, and that exception references `exc`.
        # The traceback of `exc` is removed, because its frames reference all objects of the request.
        exc.__traceback__ = None
        del kind, exc, traceback, error
        await self._context.abort(status.code, status.details, status.trailing_metadata)


def answered(servicer: type[Servicer]) -> type[Servicer]:
    """Decorates a servicer class, so that each public coroutine method runs within `answering`.

    Log records and errors contain the request id and the edge of the request. If the servicer has an attribute `where`,
    they contain its entries, too.
    """
    for name, method in list(vars(servicer).items()):
        if inspect.iscoroutinefunction(method) and not name.startswith("_"):
            setattr(servicer, name, _answered(method))
    return servicer


def _answered(method: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    @wraps(method)
    async def answer(servicer: Any, request: Any, context: Any) -> Any:
        source = getattr(request, "key", request)
        named = {name: str(value)[:256] for name in ("request_id", "edge") if (value := getattr(source, name, ""))}
        async with answering(context, **getattr(servicer, "where", {}), **named):
            return await method(servicer, request, context)

    return answer


def to_error(exc: Exception, where: Mapping[str, str]) -> StagemeshError:
    """Returns the error to report to the caller of an RPC that raised `exc`. Adds `where` to the error's metadata.

    Logs an exception that is not a StagemeshError. Call this function while the exception is being handled.
    """
    if isinstance(exc, StagemeshError):
        error = exc.located(**where)
    else:
        _log.exception("a call failed unexpectedly")
        message = f"an unexpected {type(exc).__name__}; the service's log at this time has the details"
        error = InternalError(message, metadata=where)
    return error


def streaming(method: Handler) -> Handler:
    """Decorates a method that returns a generator of responses. The generator is closed when the RPC ends.

    Without this decorator, grpc.aio leaves the generator to the garbage collector if the caller disconnects. The
    decorator closes the generator in the RPC's task, so that the generator's `finally` clauses run immediately.
    """

    @wraps(method)
    async def write_responses(servicer: object, request: object, context: Any) -> None:
        generator = cast("Any", method(servicer, request, context))
        async with aclosing(generator) as responses:
            async for response in responses:
                await context.write(response)
                # The response may be large, and a long time may pass until the next one.
                del response

    return cast("Handler", write_responses)


def time_left_s(context: Context) -> float | None:
    """Returns the number of seconds until the caller's deadline, or None if the RPC has no deadline.

    Raises DeadlineError if the deadline has passed.
    """
    return checked_time_left_s(context.time_remaining())


def checked_time_left_s(left_s: float | None) -> float | None:
    """Returns `left_s` unchanged. Raises DeadlineError if `left_s` is 0 or negative.

    `left_s` is the number of seconds until a deadline, or None if there is no deadline.
    """
    if left_s is not None and not left_s > 0:
        raise DeadlineError("the deadline passed before the call was processed; allow more time")
    return left_s


def add_stage_service(servicer: stage_pb2_grpc.StageServiceServicer, server: grpc.aio.Server) -> None:
    """Adds a StageService to `server`. Its methods PutChunk and ExecuteSteps receive and yield serialized messages."""
    stage_pb2_grpc.add_StageServiceServicer_to_server(servicer, server)
    raw_stream = cast("Any", grpc.stream_stream_rpc_method_handler)
    handlers = {"PutChunk": raw_stream(servicer.PutChunk), "ExecuteSteps": raw_stream(servicer.ExecuteSteps)}
    # They replace the handlers that protobuf has generated.
    server.add_registered_method_handlers(_STAGE_SERVICE, handlers)
