"""The ports of an orchestrator. Each port serves the RPCs of its callers' roles."""

import asyncio
import socket
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from stagemesh.common.errors import NotReadyError
from stagemesh.orchestrator.config import OrchestratorConfig, Registration, ReplicaAddress
from stagemesh.orchestrator.service import serving
from stagemesh.pipeline import load_pipeline
from stagemesh.rpc.callers import CLIENT, OPERATOR, ORCHESTRATOR, STAGE, Role, roles_of
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.server import Server
from stagemesh.services.media.service import MediaServicer
from stagemesh.v1 import jobs_pb2, media_pb2
from stagemesh.v1.media_pb2_grpc import add_MediaServiceServicer_to_server
from stagemesh.v1.roles_pb2 import CallerRole
from tests.media.locations import make_store
from tests.orchestrator.mesh import CHAIN, mesh
from tests.repository.test_contract import SERVICERS

_EVERYWHERE = {health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME}
_MEDIA = media_pb2.DESCRIPTOR.services_by_name["MediaService"].full_name
_JOBS = jobs_pb2.DESCRIPTOR.services_by_name["JobService"].full_name
METHODS = {f"/{service.full_name}/{method.name}": method for service in SERVICERS for method in service.methods}


async def _services(channel: grpc.aio.Channel) -> set[str]:
    """Returns the services that the port lists by reflection."""
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    ask = channel.stream_stream(
        f"/{reflection.SERVICE_NAME}/ServerReflectionInfo",
        request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
        response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
    )
    answer = await anext(aiter(ask(iter([request]))))
    return {service.name for service in answer.list_services_response.service} - _EVERYWHERE


async def _is_served(channel: grpc.aio.Channel, path: str, method: MethodDescriptor) -> bool:
    """Calls the RPC with a message that cannot be parsed, and returns whether the port knows the RPC."""
    call: Any = (
        cast("Any", channel.stream_stream(path))(iter([b"\xff"]), timeout=10)
        if method.client_streaming
        else cast("Any", channel.unary_stream(path))(b"\xff", timeout=10)
    )
    try:
        await call.read()
    except grpc.aio.AioRpcError as exc:
        return exc.code() is not grpc.StatusCode.UNIMPLEMENTED
    finally:
        call.cancel()
    return True


async def _served(channel: grpc.aio.Channel) -> set[str]:
    served = await asyncio.gather(*(_is_served(channel, path, method) for path, method in METHODS.items()))
    return {path for path, yes in zip(METHODS, served, strict=True) if yes}


async def test_the_clients_port_serves_the_client_role_alone(tmp_path: Path) -> None:
    async with mesh(tmp_path) as up:
        assert await _services(up.channel) == {"stagemesh.v1.OrchestratorService"}
        for_clients = {path for path in METHODS if CLIENT in roles_of(path)}
        # Processes of their own serve the others.
        others = (f"/{_MEDIA}/", f"/{_JOBS}/")
        assert await _served(up.channel) == {path for path in for_clients if not path.startswith(others)}


@pytest.mark.parametrize("role", [CLIENT, ORCHESTRATOR, STAGE, OPERATOR], ids=CallerRole.Name)
async def test_the_media_service_is_for_clients_alone(tmp_path: Path, role: Role) -> None:
    server = Server("127.0.0.1:0", roles={role})
    add_MediaServiceServicer_to_server(MediaServicer(make_store(tmp_path)), server.grpc)
    async with open_channel(f"127.0.0.1:{await server.start()}") as channel:
        served = await _served(channel)
    await server.stop(grace_s=0)
    assert served == {path for path in METHODS if path.startswith(f"/{_MEDIA}/") and role == CLIENT}


async def test_the_admin_port_serves_operators_and_stages(tmp_path: Path) -> None:
    roles: set[Role] = {OPERATOR, STAGE}
    async with mesh(tmp_path) as up:
        assert await _services(up.admin) == {
            "stagemesh.v1.AdminService",
            "stagemesh.v1.MembershipService",
            "stagemesh.v1.StageControlService",
        }
        served = await _served(up.admin)
        assert {path for path in served if not roles & roles_of(path)} == set()
        assert {path.split("/")[1] for path in served} == await _services(up.admin)


@pytest.mark.parametrize("port", ["admin_listen", "metrics_listen"])
def test_each_port_has_its_own_address(port: str) -> None:
    with pytest.raises(ValueError, match=f"{port} is 127.0.0.1:7780, as listen is"):
        OrchestratorConfig("speech", {}, "127.0.0.1:7780", **{port: "127.0.0.1:7780"})  # type: ignore[arg-type]


@pytest.mark.parametrize("port", ["admin_listen", "metrics_listen"])
async def test_a_port_that_is_in_use_is_named(tmp_path: Path, port: str) -> None:
    (tmp_path / "chain.yaml").write_text(CHAIN)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        replicas = {stage: (ReplicaAddress(stage, "127.0.0.1:1"),) for stage in "abc"}
        config = OrchestratorConfig("chain", replicas, "127.0.0.1:0", **{port: taken})  # type: ignore[arg-type]
        with pytest.raises(NotReadyError, match="it is in use") as caught:
            async with serving(config, load_pipeline(str(tmp_path / "chain.yaml"))):
                pass
    assert (caught.value.reason, caught.value.metadata["listen"]) == ("PORT_IN_USE", taken)


def test_registration_needs_an_address_at_which_replicas_register() -> None:
    with pytest.raises(ValueError, match="registration needs admin_listen"):
        OrchestratorConfig("speech", {}, "127.0.0.1:0", registration=Registration())
