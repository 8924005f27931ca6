"""The config of an orchestrator, its process, and its ports, each of which serves the RPCs of its callers' roles."""

import asyncio
import signal
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.common.process.config import dump_config, load_config
from stagemesh.orchestrator.config import OrchestratorConfig, Registration, ReplicaAddress
from stagemesh.orchestrator.service import serve, serving
from stagemesh.rpc.callers import CLIENT, OPERATOR, ORCHESTRATOR, STAGE, Role, roles_of
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.server import Server
from stagemesh.services.media.service import MediaServicer
from stagemesh.v1 import jobs_pb2, media_pb2
from stagemesh.v1.media_pb2_grpc import add_MediaServiceServicer_to_server
from stagemesh.v1.roles_pb2 import CallerRole
from tests.children import running_process
from tests.media.locations import make_store
from tests.orchestrator.mesh import CHAIN, load, mesh, until_health
from tests.repository.test_contract import SERVICERS


def _config(folder: Path, *, port: int, stages: str = "abc") -> Path:
    pipeline, config = folder / "chain.yaml", folder / "orchestrator.json"
    pipeline.write_text(CHAIN)
    replicas = {stage: (ReplicaAddress(f"{stage}-0", "127.0.0.1:1"),) for stage in stages}
    config.write_bytes(dump_config(OrchestratorConfig(str(pipeline), replicas, f"127.0.0.1:{port}")))
    return config


async def test_the_process_is_alive_without_stages_and_ends_at_sigterm(tmp_path: Path) -> None:
    port = PortPicker().pick()
    command = (sys.executable, "-m", "stagemesh.orchestrator", "--config", str(_config(tmp_path, port=port)))
    async with running_process(*command) as process:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            await until_health(channel, serving=True, service="liveness", timeout_s=20)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await process.wait() == 0


@pytest.mark.parametrize(
    ("stages", "warm", "problem"),
    [("az", {}, "stages without a replica: b, c; unknown stages: z"), ("abc", {"z": 1.0}, "unknown stages: z")],
    ids=["replicas", "warm stages"],
)
async def test_stages_that_do_not_fit_the_pipeline_are_named(
    tmp_path: Path, stages: str, warm: dict[str, float], problem: str
) -> None:
    config = load_config(OrchestratorConfig, _config(tmp_path, port=7, stages=stages))
    with pytest.raises(InvalidRequestError, match=problem):
        await serve(replace(config, warm=warm), asyncio.Event())


@pytest.mark.parametrize("above_s", [-1.0, float("nan"), float("inf")])
def test_a_warm_tier_needs_a_number_of_seconds(tmp_path: Path, above_s: float) -> None:
    config = load_config(OrchestratorConfig, _config(tmp_path, port=7))
    with pytest.raises(ValueError, match=r"warm\.a"):
        replace(config, warm={"a": above_s})


def test_a_config_is_the_same_after_writing_and_reading(tmp_path: Path) -> None:
    config = load_config(OrchestratorConfig, _config(tmp_path, port=7))
    assert config.replicas["b"] == (ReplicaAddress("b-0", "127.0.0.1:1"),)


@pytest.mark.parametrize(
    ("part", "unknown"),
    [
        ('"lisen": "h:2"', "lisen"),
        ('"registration": {"lease": 30}', "lease"),
        ('"dns": {"a": {"host": "h", "port": 1, "poll": 5}}', "poll"),
        ('"replicas": {"a": [{"name": "a-0", "endpoint": "h:2", "zome": "z"}]}', "zome"),
    ],
)
def test_an_unknown_key_in_a_config_is_named(part: str, unknown: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text('{"pipeline": "x", "listen": "h:1", "replicas": {}, ' + part + "}")
    with pytest.raises(InvalidRequestError, match=rf"\b{unknown}\b"):
        load_config(OrchestratorConfig, path)


def test_replica_names_are_unique() -> None:
    twice = (ReplicaAddress("a-0", "h:1"), ReplicaAddress("a-0", "h:2"))
    with pytest.raises(ValueError, match="a-0 more than once"):
        OrchestratorConfig("x", {"a": twice}, "h:3")


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
    names = {service.name for service in answer.list_services_response.service}
    assert names >= _EVERYWHERE
    return names - _EVERYWHERE


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
        # Other processes serve the others.
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


@pytest.mark.parametrize("port", ["listen", "admin_listen", "metrics_listen"])
async def test_a_port_that_is_in_use_is_named(tmp_path: Path, port: str) -> None:
    pipeline = load(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        taken = f"127.0.0.1:{listener.getsockname()[1]}"
        replicas = {stage: (ReplicaAddress(stage, "127.0.0.1:1"),) for stage in "abc"}
        listen = {"listen": "127.0.0.1:0", port: taken}
        config = OrchestratorConfig("chain", replicas, **listen)  # type: ignore[arg-type]
        with pytest.raises(NotReadyError, match="it is in use") as caught:
            async with serving(config, pipeline):
                pass
    assert (caught.value.reason, caught.value.metadata["listen"]) == ("PORT_IN_USE", taken)


def test_registration_needs_an_address_at_which_replicas_register() -> None:
    with pytest.raises(ValueError, match="registration needs admin_listen"):
        OrchestratorConfig("speech", {}, "127.0.0.1:0", registration=Registration())
