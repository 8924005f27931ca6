"""The gRPC server of every service: its health, its reflection, its addresses, and the roles of its callers."""

import asyncio
import socket
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.common.errors import NotFoundError, NotReadyError, UnavailableError, UnsupportedError
from stagemesh.rpc.callers import CLIENT, OPERATOR, STAGE, Role, roles_of
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.server import Server
from stagemesh.v1 import membership_pb2, membership_pb2_grpc, stage_pb2
from stagemesh.v1.stage_pb2_grpc import StageServiceStub
from tests.credentials import issue, process_credentials
from tests.rpc.call_errors import error_of, raises
from tests.rpc.health_calls import Request, check, watch

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
        assert isinstance(await error_of(health(health_pb2.HealthCheckRequest(service="nobody"))), NotFoundError)
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
    with process_credentials(issue(tmp_path, "stage/relay/relay-0")):
        server = Server(f"{host}:0", health_listen=f"{host}:{(health_port := PortPicker().pick())}")
        server.set_health("liveness", serving=True)
        server.reflect("stagemesh.v1.StageService")
        port = await server.start()
    liveness = health_pb2.HealthCheckRequest(service="liveness")
    async with open_channel(f"{host}:{health_port}") as channel:
        assert (await check(channel)(liveness)).status == SERVING
        describing = StageServiceStub(channel).Describe(stage_pb2.DescribeRequest())
        assert isinstance(await error_of(describing), UnsupportedError)
    async with open_channel(f"{host}:{port}") as channel:
        assert isinstance(await error_of(check(channel)(liveness)), UnavailableError)
    await server.stop(grace_s=0)


async def test_a_channel_has_the_name_in_the_servers_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[dict[str, int | str]] = []

    def open_insecure(endpoint: str, *, options: Sequence[tuple[str, int | str]]) -> None:
        opened.append({"endpoint": endpoint, **dict(options)})

    monkeypatch.setattr(grpc.aio, "insecure_channel", open_insecure)
    open_channel("10.0.0.9:7", server_name="vocoder.example")
    open_channel("10.0.0.9:7")
    assert [each.get("grpc.ssl_target_name_override") for each in opened] == ["vocoder.example", None]


@pytest.mark.parametrize("address", ["listen", "health_listen"])
async def test_port_in_use_is_named(address: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with raises(NotReadyError, reason="PORT_IN_USE", match=f"port {port} of 127.0.0.1: it is in use"):
            await Server(**{"listen": "127.0.0.1:0", address: f"127.0.0.1:{port}"}).start()  # type: ignore[arg-type]


@pytest.mark.parametrize("listen", ["127.0.0.1", ":50051", "127.0.0.1:99999", "127.0.0.1:x", "192.0.2.1:50051"])
async def test_impossible_address_is_named(listen: str) -> None:
    with raises(NotReadyError, reason="CANNOT_LISTEN", match="cannot listen on"):
        await Server(listen).start()


async def test_stopping_twice_is_harmless() -> None:
    server = Server("127.0.0.1:0")
    await server.start()
    await server.stop(grace_s=0)
    await server.stop(grace_s=0)


class Members(membership_pb2_grpc.MembershipServiceServicer):
    """Accepts every replica."""

    async def Register(self, request_iterator: object, context: object) -> None:  # type: ignore[override]
        await context.write(membership_pb2.RegisterResponse(lease_s=1))  # type: ignore[attr-defined]


def test_the_roles_of_an_rpc_are_those_in_the_proto() -> None:
    assert roles_of("/stagemesh.v1.MembershipService/Register") == {STAGE}
    assert roles_of("/stagemesh.v1.OrchestratorService/Generate") == {CLIENT}
    assert roles_of("/grpc.health.v1.Health/Check") == frozenset()


@pytest.mark.parametrize(("roles", "served"), [({CLIENT, OPERATOR}, False), ({CLIENT, STAGE}, True)])
async def test_a_port_serves_the_rpcs_of_its_roles_alone(roles: set[Role], served: bool) -> None:
    server = Server("127.0.0.1:0", roles=roles)
    membership_pb2_grpc.add_MembershipServiceServicer_to_server(Members(), server.grpc)
    async with open_channel(f"127.0.0.1:{await server.start()}") as channel, asyncio.timeout(10):
        await check(channel)(Request())
        register = membership_pb2_grpc.MembershipServiceStub(channel).Register(iter(()))
        answer = register.read()
        if served:
            assert await answer == membership_pb2.RegisterResponse(lease_s=1)
        else:
            error = await error_of(answer)
            assert isinstance(error, UnsupportedError)
            assert "this port serves clients and operators, and Register is for stages; call the" in error.message
    await server.stop(grace_s=0)
