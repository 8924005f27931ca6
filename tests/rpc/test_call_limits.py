"""Limits of the calls of one caller: their number, also of those whose requests never arrive, and their headers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.flood_attacks import http2
from stagemesh.conformance.fault_suite import proxied
from stagemesh.rpc.callers import CLIENT, OPERATOR, Role
from stagemesh.rpc.channels import MAX_CALLS_PER_CONNECTION, MAX_HEADER_BYTES, open_channel
from stagemesh.rpc.handlers import streaming
from stagemesh.rpc.server import Server
from stagemesh.v1 import orchestrator_pb2, orchestrator_pb2_grpc, stage_pb2, stage_pb2_grpc
from stagemesh.v1.orchestrator_pb2 import GenerateRequest, GenerateResponse
from stagemesh.v1.request_pb2 import Output
from tests.rpc.call_errors import error_of

MOST = 3


class Waiting(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Answers each request once, and ends it when the test says so."""

    def __init__(self) -> None:
        self.running = 0
        self.end = asyncio.Event()

    @streaming
    async def Generate(self, request: GenerateRequest, _context: object) -> AsyncIterator[GenerateResponse]:
        self.running += 1
        yield GenerateResponse(output=Output(name=request.request_id))
        await self.end.wait()

    async def DescribePipeline(
        self, request: orchestrator_pb2.DescribePipelineRequest, _context: object
    ) -> orchestrator_pb2.DescribePipelineResponse:
        return orchestrator_pb2.DescribePipelineResponse(pipeline=request.pipeline)


@asynccontextmanager
async def served(calls_per_caller: int | None, role: Role = CLIENT) -> AsyncGenerator[tuple[str, Waiting]]:
    """Serves a service on a free port, which is for a role. Yields its endpoint."""
    service = Waiting()  # type: ignore[abstract]
    server = Server("127.0.0.1:0", roles={role}, calls_per_caller=calls_per_caller)
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(service, server.grpc)
    endpoint = f"127.0.0.1:{await server.start()}"
    try:
        yield endpoint, service
    finally:
        await server.stop(grace_s=0)


async def test_a_caller_has_limited_calls_until_one_ends() -> None:
    async with served(MOST) as (endpoint, service), open_channel(endpoint) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        calls: list[Any] = [stub.Generate(GenerateRequest(request_id=f"r{n}")) for n in range(MOST)]
        assert [(await call.read()).output.name for call in calls] == ["r0", "r1", "r2"]
        error = await error_of(stub.Generate(GenerateRequest()))
        assert (error.reason, error.code.name) == ("CALL_LIMIT", "RESOURCE_EXHAUSTED")
        assert error.retry_after_s == 1
        other = stub.DescribePipeline(orchestrator_pb2.DescribePipelineRequest())
        assert (await error_of(other)).reason == "CALL_LIMIT"
        # The port does not serve the calls of this role.
        foreign = stage_pb2_grpc.StageServiceStub(channel).Describe(stage_pb2.DescribeRequest())
        assert (await error_of(foreign)).reason == "CALL_LIMIT"
        service.end.set()
        for call in calls:
            assert await call.read() is grpc.aio.EOF
        description = await stub.DescribePipeline(orchestrator_pb2.DescribePipelineRequest(pipeline="p"))
        assert description.pipeline == "p"


async def test_health_checks_have_a_limit_at_every_port_and_count_apart() -> None:
    async with served(None) as (endpoint, _), open_channel(endpoint) as channel:
        health: Any = health_pb2_grpc.HealthStub(channel)
        watches = [health.Watch(health_pb2.HealthCheckRequest()) for _ in range(256)]
        assert all([isinstance(await each.read(), health_pb2.HealthCheckResponse) for each in watches])
        assert (await error_of(health.Check(health_pb2.HealthCheckRequest()))).reason == "CALL_LIMIT"
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        assert await stub.DescribePipeline(orchestrator_pb2.DescribePipelineRequest())
        for each in watches:
            each.cancel()


async def test_a_call_counts_before_its_request_and_for_its_caller_alone() -> None:
    async with served(MOST) as (endpoint, _), open_channel(endpoint) as channel:
        attacker = await http2.Connection.open(endpoint)
        for _ in range(MOST):
            await attacker.send(http2.headers(attacker.new_stream(), http2.GENERATE))
        rejected = attacker.new_stream()
        await attacker.send(http2.headers(rejected, http2.GENERATE))
        async with asyncio.timeout(10):
            received = b""
            while b"has 3 running calls" not in received:
                received += await attacker.receive()
        # The other caller has another address.
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        assert (await stub.DescribePipeline(orchestrator_pb2.DescribePipelineRequest(pipeline="p"))).pipeline == "p"
        await attacker.close()


@pytest.mark.parametrize("most", [MOST, None])
async def test_large_headers_are_rejected_without_acknowledged_settings(most: int | None) -> None:
    async with served(most) as (endpoint, service):
        attacker = await http2.Connection.open(endpoint)
        stream = attacker.new_stream()
        large = {"x-large": "a" * (2 * MAX_HEADER_BYTES)}
        request = http2.message(GenerateRequest().SerializeToString())
        await attacker.send(http2.headers(stream, http2.GENERATE, large) + http2.data(stream, request, ends=True))
        async with asyncio.timeout(10):
            received = b""
            while b"headers of the call exceed" not in received:
                received += await attacker.receive()
        await attacker.close()
        assert service.running == 0


async def test_rejected_messages_of_a_host_do_not_hide_the_status_from_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagemesh.rpc.call_limits.RejectedBytes._BYTES_A_SECOND", 1 << 20)
    monkeypatch.setattr(asyncio, "open_connection", partial(asyncio.open_connection, local_addr=(http2.ATTACKER, 0)))

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield bytes(1 << 16)

    async with (
        served(None, OPERATOR) as (endpoint, _),
        proxied(endpoint) as (_, proxy),
        open_channel(proxy) as attacker,
        open_channel(endpoint) as channel,
    ):
        flood: Any = attacker.unary_unary(http2.GENERATE)
        assert (await error_of(flood(bytes(8_000_000)))).code.name == "UNIMPLEMENTED"
        stream: Any = channel.stream_stream(http2.GENERATE)
        assert (await error_of(stream(parts()))).code.name == "UNIMPLEMENTED"


async def test_a_call_without_a_message_is_rejected() -> None:
    async with served(MOST) as (endpoint, service), open_channel(endpoint) as channel:
        no_message: Any = channel.stream_unary(http2.GENERATE)
        assert (await error_of(no_message(iter(())))).reason == "MALFORMED_MESSAGE"
        assert service.running == 0


async def test_a_client_runs_more_calls_than_a_connection_permits() -> None:
    most = MAX_CALLS_PER_CONNECTION + 8
    async with served(most) as (endpoint, service), open_channel(endpoint) as channel, asyncio.timeout(30):
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        calls: list[Any] = [stub.Generate(GenerateRequest(request_id="r")) for _ in range(most)]
        for call in calls:
            assert (await call.read()).output.name == "r"
        assert service.running == most
        service.end.set()
        for call in calls:
            assert await call.read() is grpc.aio.EOF
