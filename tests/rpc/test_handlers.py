"""How errors of handlers and of proxies reach callers, and how handlers end with their callers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2_grpc

from stagemesh.common import errors
from stagemesh.common.errors import DeadlineError, InternalError, OverloadedError, StagemeshError
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.handlers import answering, streaming, time_left_s
from tests.rpc.call_errors import error_of
from tests.rpc.health_calls import Request, Response, check, watch

Context = grpc.aio.ServicerContext[Request, Response]
Body = Callable[[Context], Awaitable[None]]


class Servicer(health_pb2_grpc.HealthServicer):
    """Runs the body of a test in an RPC."""

    def __init__(self, body: Body, **place: str) -> None:
        self.body, self.place = body, place
        self.left = asyncio.Event()

    async def Check(self, request: Request, context: Context) -> Response:
        async with answering(context, **self.place):
            await self.body(context)
        return Response()

    @streaming
    async def Watch(self, request: Request, context: Context) -> AsyncIterator[Response]:
        try:
            while True:
                yield Response()
        finally:
            self.left.set()


async def test_error_travels_with_reason_place_and_delay() -> None:
    error = await received(OverloadedError("full", metadata={"edge": "a->b"}, retry_after_s=0.5), stage="thinker")
    assert isinstance(error, OverloadedError)
    assert (error.message, error.reason, error.retry_after_s) == ("full", "OVERLOADED", 0.5)
    assert error.metadata == {"stage": "thinker", "edge": "a->b"}


async def test_unforeseen_error_hides_its_text(caplog: pytest.LogCaptureFixture) -> None:
    error = await received(ValueError("a secret"))
    assert isinstance(error, InternalError)
    assert "ValueError" in error.message
    assert "secret" not in error.message
    assert "a secret" in caplog.text


async def test_endless_message_still_arrives() -> None:
    error = await received(OverloadedError("é" * 50_000))
    assert isinstance(error, OverloadedError)
    assert error.message.startswith("ééé")
    assert error.message.endswith("…")


async def test_generator_is_closed_when_its_caller_hangs_up() -> None:
    servicer = Servicer(_pass)
    async with _serving(servicer) as channel:
        call = watch(channel)(Request())
        await anext(aiter(call))
        call.cancel()
        await asyncio.wait_for(servicer.left.wait(), timeout=5)


async def test_deadline_is_seconds_left() -> None:
    seen: list[float | None] = []

    async def look(context: Context) -> None:
        seen.append(time_left_s(context))

    async with _serving(Servicer(look)) as channel:
        await check(channel)(Request(), timeout=30)
        await check(channel)(Request())
    assert seen[0] is not None
    assert 25 < seen[0] < 31
    assert seen[1] is None


def test_passed_deadline_is_an_error() -> None:
    passed: Any = SimpleNamespace(time_remaining=lambda: 0.0)
    with pytest.raises(DeadlineError, match="allow more time"):
        time_left_s(passed)


async def _pass(context: Context) -> None:
    pass


async def received(failure: Exception | grpc.StatusCode, **place: str) -> StagemeshError:
    """Returns the error of a call that fails at a place with an error, or with a status that a proxy created."""

    async def fail(context: Context) -> None:
        if isinstance(failure, Exception):
            raise failure
        await context.abort(failure, "a proxy rejects the call")

    async with _serving(Servicer(fail, **place)) as channel:
        return await error_of(check(channel)(Request()), peer="it")


@asynccontextmanager
async def _serving(servicer: health_pb2_grpc.HealthServicer) -> AsyncGenerator[grpc.aio.Channel]:
    """Serves a servicer on a free port."""
    server = grpc.aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(None)


CLASSES = [
    kind
    for kind in vars(errors).values()
    if isinstance(kind, type) and issubclass(kind, StagemeshError) and kind is not StagemeshError
]
FOREIGN = {
    grpc.StatusCode.UNAUTHENTICATED: errors.UnauthenticatedError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDeniedError,
    grpc.StatusCode.NOT_FOUND: errors.NotFoundError,
    grpc.StatusCode.UNAVAILABLE: errors.UnavailableError,
    grpc.StatusCode.DATA_LOSS: errors.InternalError,
}


@pytest.mark.parametrize("kind", CLASSES)
async def test_every_error_arrives_as_it_was_raised(kind: type[StagemeshError]) -> None:
    error = await received(kind("full", metadata={"edge": "a->b"}, retry_after_s=0.5))
    assert (type(error), error.code, error.message) == (kind, kind.code, "full")
    assert (error.reason, error.metadata, error.retry_after_s) == (kind("").reason, {"edge": "a->b"}, 0.5)


@pytest.mark.parametrize(("code", "kind"), FOREIGN.items())
async def test_a_status_of_a_proxy_becomes_the_error_of_its_code(
    code: grpc.StatusCode, kind: type[StagemeshError]
) -> None:
    error = await received(code)
    assert (type(error), error.reason, error.metadata) == (kind, kind("").reason, {"peer": "it"})
    assert "a proxy rejects the call" in error.message
