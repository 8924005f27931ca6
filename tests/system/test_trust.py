"""Deployments by TLS, as real processes: who is refused, and certificates that are renewed under load."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from stagemesh.client import AsyncClient, Client, Text
from stagemesh.common.errors import ExistsError, NotFoundError, UnavailableError
from stagemesh.common.wire.versions import own_protocol
from stagemesh.rpc.channels import CHANNEL_OPTIONS, open_sync
from stagemesh.rpc.credentials import Credentials
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import admin_pb2, admin_pb2_grpc, orchestrator_pb2, stage_pb2
from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceStub
from stagemesh.v1.stage_pb2_grpc import StageServiceStub
from tests.credentials import issue, process_credentials
from tests.deployment import Deployment, deployed
from tests.module_fixtures import made_for_module
from tests.rpc.call_errors import raises
from tests.soak.load import Load
from tests.system.cluster import cluster, load, until_ready
from tests.system.pipelines import relays
from tests.system.streaming import orchestrating

REPLICAS = {f"{stage}-0": f"stage/{stage}/{stage}-*" for stage in ("source", "frames", "sound")}
PROCESSES = {"orchestrator": "orchestrator/main", **REPLICAS}
_STEP_S = 0.05


authority = made_for_module(lambda folder: folder / "authority")


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("relays")
    path = relays(folder, steps=20, step_s=0.05)
    path.write_text(f"{path.read_text()}media: {{store: {folder / 'store'}}}\n")
    return path


@pytest.fixture(scope="module")
def up(authority: Path, file: Path) -> Iterator[Deployment]:
    with deployed(file, "--tls", str(authority)) as up:
        yield up


@pytest.fixture
def client(up: Deployment, authority: Path) -> Iterator[Client]:
    with Client(up.endpoint, tls=authority / "client") as client:
        yield client


@pytest.fixture
def other(up: Deployment, authority: Path) -> Iterator[Client]:
    """A client with the certificate of another caller."""
    folder = issue(authority.parent, "client/other", authority=authority.name)
    with Client(up.endpoint, tls=folder) as client:
        yield client


def _stagemesh(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    command = [str(Path(sys.executable).with_name("stagemesh")), *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=60)


def test_users_connect_with_the_certificates_of_up(up: Deployment, authority: Path, client: Client) -> None:
    first, second = (client.generate("hello", seed=1).result().text for _ in range(2))
    assert first == second != ""
    assert client.describe().caller == "local"
    answer = _stagemesh("generate", "hello", "--server", up.endpoint, "--json", STAGEMESH_TLS=str(authority / "client"))
    assert answer.returncode == 0, answer.stderr
    tls = ("--tls", str(authority / "operator"))
    shown = _stagemesh("admin", "replicas", "--server", up.admin_endpoint, *tls, "--json")
    assert {each["name"] for each in json.loads(shown.stdout)["replicas"]} == {"source-0", "relay-0", "frames-0"}


def test_files_are_stored_and_read_by_tls(client: Client, tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"pixels")
    client.download(client.upload(tmp_path / "image.png"), tmp_path / "copy.png")
    assert (tmp_path / "copy.png").read_bytes() == b"pixels"


def test_a_context_has_the_credentials(up: Deployment, authority: Path, tmp_path: Path) -> None:
    home = {"XDG_CONFIG_HOME": str(tmp_path), "HOME": str(tmp_path)}
    tls = str(authority / "client")
    assert _stagemesh("context", "add", "here", "--server", up.endpoint, "--tls", tls, **home).returncode == 0
    assert _stagemesh("context", "use", "here", **home).returncode == 0
    assert _stagemesh("generate", "hello", **home).returncode == 0
    assert _stagemesh("generate", "hello", "--server", up.endpoint, "--wait", "0", **home).returncode == 4


def test_a_client_may_not_use_the_port_of_operators(up: Deployment, authority: Path) -> None:
    answer = _stagemesh("admin", "replicas", "--server", up.admin_endpoint, "--tls", str(authority / "client"))
    assert answer.returncode == 6
    assert "ListReplicas is for operators" in answer.stderr


@pytest.mark.parametrize("port", ["clients", "operators", "stage"])
def test_calls_without_tls_are_refused(up: Deployment, port: str) -> None:
    endpoint = {"clients": up.endpoint, "operators": up.admin_endpoint, "stage": up.statuses["relay-0"]["endpoint"]}
    with grpc.insecure_channel(endpoint[port]) as channel, pytest.raises(grpc.RpcError) as caught:
        OrchestratorServiceStub(channel).DescribePipeline(orchestrator_pb2.DescribePipelineRequest(), timeout=10)
    error = from_rpc_error(caught.value, peer="x")
    assert isinstance(error, UnavailableError)
    assert "if only one of both uses TLS" in error.message


@pytest.mark.parametrize("role", ["client", "operator"])
def test_a_user_may_not_call_a_stage(up: Deployment, authority: Path, role: str) -> None:
    ca, key, certificate = ((authority / role / name).read_bytes() for name in ("ca.crt", "tls.key", "tls.crt"))
    credentials = grpc.ssl_channel_credentials(ca, key, certificate)
    endpoint = up.statuses["relay-0"]["endpoint"]
    with grpc.secure_channel(endpoint, credentials) as channel, pytest.raises(grpc.RpcError) as caught:
        StageServiceStub(channel).CancelStep(stage_pb2.CancelStepRequest(request_id="x"), timeout=10)
    assert from_rpc_error(caught.value, peer="x").reason == "WRONG_ROLE"


def test_a_session_can_be_continued_by_its_own_caller_alone(client: Client, other: Client) -> None:
    with client.converse(session_id="mine"), raises(ExistsError, reason="SESSION_EXISTS"):
        other.converse(session_id="mine").__enter__()


@pytest.mark.parametrize(("name", "accepted"), [("source-0", True), ("x-0", False)])
def test_a_replica_sends_under_its_own_name_alone(
    up: Deployment, authority: Path, client: Client, name: str, accepted: bool
) -> None:
    folder = issue(authority.parent, "stage/source/source-0", authority=authority.name)
    generation = client.describe().generation
    hello = stage_pb2.Hello(replica=name, incarnation="1", pipeline="relays", generation=generation)
    hello.protocol.CopyFrom(own_protocol())
    with open_sync(up.statuses["relay-0"]["endpoint"], Credentials(folder), CHANNEL_OPTIONS) as channel:
        call = StageServiceStub(channel).PutChunk(iter([stage_pb2.PutChunkRequest(hello=hello)]), timeout=10)
        if accepted:
            assert next(call).HasField("welcome")
        else:
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert from_rpc_error(caught.value, peer="x").reason == "REPLICA_MISMATCH"
        call.cancel()


def test_a_client_cannot_cancel_or_read_the_request_of_another(client: Client, other: Client) -> None:
    events = iter(client.generate("hello", request_id="mine"))
    next(events)
    with raises(NotFoundError, reason="UNKNOWN_REQUEST"):
        other.cancel("mine")
    with raises(ExistsError, reason="REQUEST_EXISTS"):
        other.generate("hello", request_id="mine").result()
    client.cancel("mine")
    events.close()


async def test_another_caller_cannot_end_a_request_at_a_second_orchestrator(
    up: Deployment, authority: Path, file: Path, client: Client
) -> None:
    theft = orchestrator_pb2.GenerateRequest(request_id="known", caller="mallory", earlier_calls=1_000_000)
    theft.input.text = "hello"
    folder = issue(authority.parent, "orchestrator/second", "client/second", authority=authority.name)
    whole = (await asyncio.to_thread(client.generate("hello", seed=1).result)).text
    with process_credentials(folder):
        async with orchestrating(file, up) as second, AsyncClient(up.endpoint, tls=authority / "client") as victim:
            events = aiter(victim.generate("hello", seed=1, request_id="known"))
            while not isinstance(first := await anext(events), Text):
                pass
            shown = await asyncio.to_thread(_inspect, up, authority, "known")
            assert any(step.HasField("report") for step in shown.steps), "operators find the steps of the request"
            stolen = [event async for event in await second.generate(theft, time_left_s=30.0)]
            assert orchestrator_pb2.GenerateResponse.FromString(stolen[-1]).HasField("finished")
            rest = [event.delta async for event in events if isinstance(event, Text)]
    assert "".join((first.delta, *rest)) == whole


def _inspect(up: Deployment, authority: Path, request_id: str) -> admin_pb2.GetRequestResponse:
    with open_sync(up.admin_endpoint, Credentials(authority / "operator"), CHANNEL_OPTIONS) as channel:
        request = admin_pb2.GetRequestRequest(request_id=request_id)
        return admin_pb2_grpc.AdminServiceStub(channel).GetRequest(request, timeout=10)


@pytest.mark.timeout(240)
async def test_certificates_and_their_authority_are_replaced_under_load(tmp_path: Path) -> None:
    for name, identity in PROCESSES.items():
        issue(tmp_path, identity, authority="old").rename(tmp_path / name)
    client = issue(tmp_path, "client/a", authority="old")
    with process_credentials(client), cluster(tmp_path, step_s=_STEP_S, tls=tmp_path) as replicas:
        for name in REPLICAS:
            replicas.start(name)
        async with AsyncClient(replicas.endpoint) as asking:
            await until_ready(asking, replicas=1)
            new = issue(tmp_path, "client/a", authority="new")
            async with load(replicas.endpoint) as running:
                await _until_ended(running, 4)
                # Everyone trusts both authorities before anyone has a certificate of the new one.
                both = (client / "ca.crt").read_bytes() + (new / "ca.crt").read_bytes()
                for folder in (client, *(tmp_path / name for name in PROCESSES)):
                    (folder / "ca.crt").write_bytes(both)
                for name, identity in PROCESSES.items():
                    _copy(issue(tmp_path, identity, authority="new"), tmp_path / name, "tls.key", "tls.crt")
                _copy(new, client, "tls.key", "tls.crt")
                for folder in (client, *(tmp_path / name for name in PROCESSES)):
                    _copy(new, folder, "ca.crt")
                # The replicas connect again, with the new certificates, to an orchestrator that has not restarted.
                for name in REPLICAS:
                    await replicas.restart(name)
                    await until_ready(asking, replicas=1)
                await _until_ended(running, len(running.ended) + 8)
        # The former authority has lost its power.
        former = issue(tmp_path, "client/b", authority="old")
        _copy(new, former, "ca.crt")
        async with AsyncClient(replicas.endpoint, tls=former) as late:
            with pytest.raises(UnavailableError):
                await late.describe()


@pytest.mark.timeout(120)
@pytest.mark.parametrize("other", ["stage/sound/sound-0", "stage/sound/frames-0"], ids=["replica", "stage"])
async def test_a_replica_with_the_certificate_of_another_does_not_register(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], other: str
) -> None:
    for name, identity in {**PROCESSES, "frames-0": other}.items():
        issue(tmp_path, identity).rename(tmp_path / name)
    shown = ""
    with process_credentials(issue(tmp_path, "client/a")), cluster(tmp_path, step_s=_STEP_S, tls=tmp_path) as replicas:
        for name in REPLICAS:
            replicas.start(name)
        async with AsyncClient(replicas.endpoint) as client, asyncio.timeout(60):
            while "does not name replica 'frames-0'" not in shown:
                await asyncio.sleep(0.1)
                shown += capfd.readouterr().err
            stages = {stage.name: len(stage.replicas) for stage in (await client.describe()).stages}
            assert stages["frames"] == 0


async def _until_ended(running: Load, count: int) -> None:
    while len(running.ended) < count:
        await asyncio.sleep(_STEP_S)


def _copy(source: Path, target: Path, *names: str) -> None:
    for name in names:
        (target / name).write_bytes((source / name).read_bytes())
