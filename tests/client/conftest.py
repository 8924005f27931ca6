from collections.abc import AsyncIterator

import pytest

from stagemesh.services.serving.server import Server
from stagemesh.v1.orchestrator_pb2_grpc import add_OrchestratorServiceServicer_to_server
from tests.client.scripted import ScriptedOrchestrator


@pytest.fixture
async def orchestrator() -> AsyncIterator[ScriptedOrchestrator]:
    service = ScriptedOrchestrator()
    server = Server("127.0.0.1:0")
    add_OrchestratorServiceServicer_to_server(service, server.grpc)
    service.endpoint = f"127.0.0.1:{await server.start()}"
    yield service
    await server.stop(grace_s=0)
