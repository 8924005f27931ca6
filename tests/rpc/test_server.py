"""The gRPC server of every service."""

import socket
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.common.errors import NotReadyError
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.server import Server
from stagemesh.v1 import stage_pb2
from stagemesh.v1.stage_pb2_grpc import StageServiceStub
from tests.credentials import issue, process_credentials
from tests.rpc.health_calls import check, watch

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def test_health_has_a_name_for_each_facet() -> None:
    server = Server("127.0.0.1:0")
    server.set_health("liveness", serving=True)
    async with open_channel(f"127.0.0.1:{await server.start()}") as channel:
        health = check(channel)
        whole = await health(health_pb2.HealthCheckRequest())
        facet = await health(health_pb2.HealthCheckRequest(service="liveness"))
        assert (whole.status, facet.status) == (NOT_SERVING, SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health(health_pb2.HealthCheckRequest(service="nobody"))
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    await server.stop(grace_s=0)


async def test_watchers_receive_changes_and_the_end() -> None:
    server = Server("127.0.0.1:0")
    async with open_channel(f"127.0.0.1:{await server.start()}") as channel:
        statuses = aiter(watch(channel)(health_pb2.HealthCheckRequest(service="x")))
        assert (await anext(statuses)).status == SERVICE_UNKNOWN
        server.set_health("x", serving=True)
        assert (await anext(statuses)).status == SERVING
        await server.stop(grace_s=5)
        assert [response.status async for response in statuses] == [NOT_SERVING]


async def test_health_is_served_without_tls_and_nothing_else(tmp_path: Path) -> None:
    host = "127.0.0.1"
    with process_credentials(issue(tmp_path, "stage/relay-0")):
        server = Server(f"{host}:0", health_listen=f"{host}:{(health_port := PortPicker().pick())}")
        server.set_health("liveness", serving=True)
        server.reflect("stagemesh.v1.StageService")
        port = await server.start()
    liveness = health_pb2.HealthCheckRequest(service="liveness")
    async with open_channel(f"{host}:{health_port}") as channel:
        assert (await check(channel)(liveness)).status == SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await StageServiceStub(channel).Describe(stage_pb2.DescribeRequest())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    async with open_channel(f"{host}:{port}") as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await check(channel)(liveness)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    await server.stop(grace_s=0)


async def test_a_channel_has_the_name_in_the_servers_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, int | str]] = []

    def open_insecure(endpoint: str, *, options: Sequence[tuple[str, int | str]]) -> None:
        opened.append({"endpoint": endpoint, **dict(options)})

    monkeypatch.setattr(grpc.aio, "insecure_channel", open_insecure)
    open_channel("10.0.0.9:7", server_name="vocoder.example")
    open_channel("10.0.0.9:7")
    assert [each.get("grpc.ssl_target_name_override") for each in opened] == ["vocoder.example", None]


async def test_reflection_lists_services() -> None:
    server = Server("127.0.0.1:0")
    server.reflect("stagemesh.v1.StageService")
    async with open_channel(f"127.0.0.1:{await server.start()}") as channel:
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        list_services = channel.stream_stream(
            "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )
        answer = await anext(aiter(list_services(iter([ask]))))
        names = {service.name for service in answer.list_services_response.service}
    assert {"grpc.health.v1.Health", "stagemesh.v1.StageService"} <= names
    await server.stop(grace_s=0)


async def test_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NotReadyError, match=f"port {port} of 127.0.0.1: it is in use") as caught:
            await Server(f"127.0.0.1:{port}").start()
    assert caught.value.reason == "PORT_IN_USE"


@pytest.mark.parametrize("listen", ["127.0.0.1", ":50051", "127.0.0.1:99999", "127.0.0.1:x", "192.0.2.1:50051"])
async def test_impossible_address_is_named(listen: str) -> None:
    with pytest.raises(NotReadyError, match="cannot listen on") as caught:
        await Server(listen).start()
    assert caught.value.reason == "CANNOT_LISTEN"


async def test_a_health_port_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(NotReadyError, match=f"port {port} of 127.0.0.1: it is in use"):
            await Server("127.0.0.1:0", health_listen=f"127.0.0.1:{port}").start()


async def test_stopping_twice_is_harmless() -> None:
    server = Server("127.0.0.1:0")
    await server.start()
    await server.stop(grace_s=0)
    await server.stop(grace_s=0)
