"""Calls through a gate in front of the orchestrator, such as a proxy or a security layer, that rejects credentials."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from stagemesh.client import AsyncClient, Client
from stagemesh.common.errors import PermissionDeniedError, StagemeshError, UnauthenticatedError
from stagemesh.rpc.handlers import answering
from tests.client.scripted import Pause, ScriptedOrchestrator, admitted, text

Call = Callable[[AsyncClient], Awaitable[object]]
CODES = [
    (grpc.StatusCode.UNAUTHENTICATED, UnauthenticatedError),
    (grpc.StatusCode.PERMISSION_DENIED, PermissionDeniedError),
]


class Gate(grpc.aio.ServerInterceptor):
    """Rejects every call: with a bare status, as a proxy does, or with an error of Stagemesh."""

    def __init__(self) -> None:
        self.rejection: grpc.StatusCode | StagemeshError = grpc.StatusCode.UNAUTHENTICATED
        self.methods: list[str] = []

    async def intercept_service(self, continuation: object, details: grpc.HandlerCallDetails) -> Any:
        self.methods.append(details.method.rpartition("/")[2])
        return grpc.unary_unary_rpc_method_handler(self._reject)

    async def _reject(self, request: object, context: grpc.aio.ServicerContext[object, object]) -> None:
        async with answering(context):
            if isinstance(self.rejection, StagemeshError):
                raise self.rejection
            await context.abort(self.rejection, "the token has expired")


@pytest.fixture
def gate() -> Gate:
    return Gate()


@pytest.fixture
async def endpoint(gate: Gate) -> AsyncIterator[str]:
    server = grpc.aio.server(interceptors=[gate])
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.mark.parametrize(("code", "kind"), CODES)
@pytest.mark.parametrize("by_proxy", [True, False])
async def test_a_rejection_is_final(
    gate: Gate, endpoint: str, code: grpc.StatusCode, kind: type[StagemeshError], by_proxy: bool
) -> None:
    gate.rejection = code if by_proxy else kind("the token has expired", metadata={"stage": "thinker"})
    async with AsyncClient(endpoint, endpoint) as client:
        with pytest.raises(kind, match="the token has expired") as caught:
            await client.generate("hello").result()
    assert caught.value.metadata == ({"peer": endpoint} if by_proxy else {"stage": "thinker"})
    assert caught.value.reason == code.name
    assert gate.methods == ["Generate"]


@pytest.mark.parametrize("call", [lambda client: client.cancel("r"), lambda client: client.describe()])
async def test_a_unary_call_tries_no_other_endpoint(gate: Gate, endpoint: str, call: Call) -> None:
    async with AsyncClient(endpoint, endpoint) as client:
        with pytest.raises(UnauthenticatedError):
            await call(client)
    assert len(gate.methods) == 1


async def test_the_synchronous_client_raises_it(gate: Gate, endpoint: str) -> None:
    with Client(endpoint) as client, pytest.raises(UnauthenticatedError):
        await asyncio.to_thread(client.generate("hello").result)
    assert gate.methods == ["Generate"]


async def test_a_search_for_a_lost_request_ends(orchestrator: ScriptedOrchestrator, gate: Gate, endpoint: str) -> None:
    orchestrator.scripts.append([admitted(), text("Hi"), Pause.BREAK])
    async with AsyncClient(orchestrator.endpoint, endpoint) as client:
        with pytest.raises(UnauthenticatedError):
            await client.generate("hello").result()
    assert (len(orchestrator.requests), gate.methods) == (1, ["Generate"])
