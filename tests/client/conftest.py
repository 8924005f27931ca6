from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest

from stagemesh.rpc.server import Server
from stagemesh.v1.orchestrator_pb2_grpc import add_OrchestratorServiceServicer_to_server
from tests.client.scripted import ScriptedOrchestrator


@pytest.fixture
async def orchestrator() -> AsyncIterator[ScriptedOrchestrator]:
    async with _served() as service:
        yield service


@pytest.fixture
async def other() -> AsyncIterator[ScriptedOrchestrator]:
    """A second orchestrator of the same pipeline."""
    async with _served() as service:
        yield service


@asynccontextmanager
async def _served() -> AsyncGenerator[ScriptedOrchestrator]:
    service = ScriptedOrchestrator()
    server = Server("127.0.0.1:0")
    add_OrchestratorServiceServicer_to_server(service, server.grpc)
    service.endpoint = f"127.0.0.1:{await server.start()}"
    yield service
    await server.stop(grace_s=0)
