"""Clients that lose their connection or orchestrator, with real processes. They receive the same outputs as without the
loss.
"""

import signal
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen

import grpc
import pytest

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.client import AsyncClient, Choice, Client, Generation, Result, Text
from stagemesh.client.responses import ResultBuilder
from stagemesh.common.errors import UnavailableError
from stagemesh.common.process.config import dump_config
from stagemesh.orchestrator.config import OrchestratorConfig, ReplicaAddress
from stagemesh.rpc.channels import CHANNEL_OPTIONS
from stagemesh.v1 import admin_pb2, admin_pb2_grpc, stage_pb2
from tests.deployment import Deployment, deployed, eventually
from tests.system.breakable_relay import breakable_relay
from tests.system.pipelines import relays

STEPS = 40


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    with deployed(relays(tmp_path_factory.mktemp("relays"), steps=STEPS, step_s=0.04)) as up:
        yield up


@pytest.fixture(scope="module")
def undisturbed(up: Deployment) -> Result:
    with up.client() as client:
        return client.generate("hello", seed=7).result()


def test_a_broken_connection_changes_nothing(up: Deployment, undisturbed: Result) -> None:
    with breakable_relay(up.endpoint) as way, Client(way.endpoint) as client:
        call = client.generate("hello", seed=7)
        result = _run(call, {5: way.cut, 12: way.cut, 13: way.cut, 30: way.cut})
    assert _contents(result) == _contents(undisturbed)
    assert _attempts(up, call.request_id) == {1}
    eventually(up.idle, timeout_s=10)


def test_a_request_with_a_random_seed_resumes_too(up: Deployment) -> None:
    with breakable_relay(up.endpoint) as way, Client(way.endpoint) as client:
        result = _run(client.generate("hello"), {10: lambda: up.kill("orchestrator")})
    with up.client() as client:
        assert _contents(client.generate("hello", seed=result.seed).result()) == _contents(result)


def test_a_restarted_orchestrator_changes_nothing(up: Deployment, undisturbed: Result) -> None:
    with up.client() as client:
        call = client.generate("hello", seed=7)
        result = _run(call, {20: lambda: up.kill("orchestrator")})
    assert _contents(result) == _contents(undisturbed)
    assert _attempts(up, call.request_id) == {1}, "it continues with the running steps"
    eventually(up.idle, timeout_s=10)


# One orchestrator is killed, and one hangs: the steps of that one continue until they are taken over.
@pytest.mark.parametrize(("blow", "choices"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGSTOP, 3)])
async def test_another_orchestrator_continues_the_request(
    up: Deployment, tmp_path: Path, blow: signal.Signals, choices: int
) -> None:
    with up.client() as client:
        undisturbed = client.generate("hello", seed=7, choices=choices).result()
    with _orchestrator(up, tmp_path) as (endpoint, process):
        builder = ResultBuilder()
        async with AsyncClient(endpoint, up.endpoint) as client:
            texts, call = 0, client.generate("hello", seed=7, choices=choices)
            async for event in call:
                builder.add(event)
                texts += isinstance(event, Text)
                if texts == STEPS // 4:
                    process.send_signal(blow)
            assert client.endpoint == up.endpoint
    assert list(map(_contents, builder.build().choices)) == list(map(_contents, undisturbed.choices))
    if choices == 1:
        assert _attempts(up, call.request_id) == {1}, "it continues with the running steps"
    eventually(up.idle, timeout_s=10)


async def test_clients_of_a_stopping_orchestrator_continue_on_another(
    up: Deployment, undisturbed: Result, tmp_path: Path
) -> None:
    with _orchestrator(up, tmp_path, drain_s=0.1) as (endpoint, process):
        builder = ResultBuilder()
        async with AsyncClient(endpoint, up.endpoint) as client:
            texts, call = 0, client.generate("hello", seed=7)
            async for event in call:
                builder.add(event)
                texts += isinstance(event, Text)
                if texts == STEPS // 2 and isinstance(event, Text):
                    process.terminate()
    assert _contents(builder.build()) == _contents(undisturbed)
    assert _attempts(up, call.request_id) == {1}, "it continues with the running steps"


def _run(call: Generation, at: "dict[int, Callable[[], None]]") -> Result:
    """Runs a request, and calls a function once a number of texts has arrived."""
    builder, texts = ResultBuilder(), 0
    for event in call:
        builder.add(event)
        if isinstance(event, Text):
            texts += 1
            at.pop(texts, _nothing)()
    assert not at, "something was not done"
    return builder.build()


def _serves(client: Client) -> bool:
    try:
        stages = client.describe().stages
    except UnavailableError:
        return False
    return all(replica.state == stage_pb2.REPLICA_STATE_READY for stage in stages for replica in stage.replicas)


def _nothing() -> None:
    pass


def _contents(result: Choice) -> tuple[str, bytes]:
    return result.text, b"".join(output.tensor.tobytes() for output in result.tensors["frames"])


def _attempts(up: Deployment, request_id: str) -> set[int]:
    """Returns the attempts with which the orchestrator ran the request."""
    with grpc.insecure_channel(up.admin_endpoint, options=CHANNEL_OPTIONS) as channel:
        request = admin_pb2.GetRequestRequest(request_id=request_id)
        answer = admin_pb2_grpc.AdminServiceStub(channel).GetRequest(request, timeout=10, wait_for_ready=True)
    return {attempt.attempt for attempt in answer.steps}


@contextmanager
def _orchestrator(up: Deployment, folder: Path, *, drain_s: float = 10.0) -> "Generator[tuple[str, Popen[bytes]]]":
    """Starts another orchestrator over the same replicas and waits until it serves."""
    endpoint = f"127.0.0.1:{PortPicker().pick()}"
    replicas: dict[str, tuple[ReplicaAddress, ...]] = {}
    for name in up.replicas():
        address = ReplicaAddress(name, up.statuses[name]["endpoint"])
        replicas[name.rpartition("-")[0]] = (address,)
    pipeline = relays(folder, steps=STEPS, step_s=0.04)
    config = folder / "orchestrator.json"
    config.write_bytes(dump_config(OrchestratorConfig(str(pipeline), replicas, endpoint, drain_s=drain_s)))
    with Popen([sys.executable, "-m", "stagemesh.orchestrator", "--config", str(config)]) as process:
        try:
            with Client(endpoint) as client:
                eventually(lambda: _serves(client), timeout_s=30)
            yield endpoint, process
        finally:
            process.kill()
