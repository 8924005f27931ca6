"""`stagemesh up` with fake stages: its processes are killed, stopped and replaced, and no client notices."""

import signal
import subprocess
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.client import AsyncClient, Choice, Client, Text
from stagemesh.client.responses import ResultBuilder
from stagemesh.common.errors import UnavailableError
from stagemesh.orchestrator.config import OrchestratorConfig, ReplicaAddress
from stagemesh.v1 import stage_pb2
from tests.children import config_command, killed_at_end
from tests.deployment import Deployment, deployed, deployed_for_module, eventually
from tests.system.breakable_relay import breakable_relay
from tests.system.pipelines import relays
from tests.system.reading import contents, read, steps_of

SEED, STEPS, STEP_S = 2**63 - 2, 40, 0.03
CHOICES = (1, 3)


up = deployed_for_module(lambda folder: relays(folder, steps=STEPS, step_s=STEP_S))


@pytest.fixture(scope="module")
def undisturbed(up: Deployment) -> Sequence[Choice]:
    with up.client() as client:
        return client.generate("hello", seed=SEED, choices=max(CHOICES)).result().choices


@pytest.fixture(autouse=True)
def _released(up: Deployment) -> Iterator[None]:
    yield
    up.wait(Deployment.all_ready)
    eventually(up.idle, timeout_s=10)


def _check(found: Sequence[Choice], undisturbed: Sequence[Choice]) -> None:
    assert list(map(contents, found)) == list(map(contents, undisturbed[: len(found)]))


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize("replica", ["source-0", "relay-0", "frames-0"])
def test_a_killed_stage_restarts(up: Deployment, undisturbed: Sequence[Choice], replica: str, choices: int) -> None:
    first = up.process_id(replica)
    with up.client() as client:
        result = read(client.generate("hello", seed=SEED, choices=choices), {20: lambda: up.kill(replica)})
    _check(result.choices, undisturbed)
    up.wait(Deployment.all_ready)
    assert up.process_id(replica) != first


@pytest.mark.parametrize("choices", CHOICES)
def test_a_restarted_orchestrator_changes_nothing(up: Deployment, undisturbed: Sequence[Choice], choices: int) -> None:
    with up.client() as client:
        call = client.generate("hello", seed=SEED, choices=choices)
        result = read(call, {20: lambda: up.kill("orchestrator")})
    _check(result.choices, undisturbed)
    if choices == 1:
        assert _attempts(up, call.request_id) == {1}, "it continues with the running steps"


@pytest.mark.parametrize("choices", CHOICES)
def test_a_broken_connection_changes_nothing(up: Deployment, undisturbed: Sequence[Choice], choices: int) -> None:
    with breakable_relay(up.endpoint) as way, Client(way.endpoint) as client:
        call = client.generate("hello", seed=SEED, choices=choices)
        result = read(call, dict.fromkeys((5, 12, 13, 30), way.cut))
    _check(result.choices, undisturbed)
    if choices == 1:
        assert _attempts(up, call.request_id) == {1}


def test_a_request_with_a_random_seed_resumes_too(up: Deployment) -> None:
    with breakable_relay(up.endpoint) as way, Client(way.endpoint) as client:
        result = read(client.generate("hello"), {10: lambda: up.kill("orchestrator")})
    with up.client() as client:
        assert contents(client.generate("hello", seed=result.seed).result()) == contents(result)


# One orchestrator is killed, and one hangs: the steps of that one continue until they are taken over. The last one is
# stopped, and has no time to finish its requests.
@pytest.mark.parametrize(
    ("blow", "choices"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 1), (signal.SIGSTOP, 3), (signal.SIGTERM, 1)]
)
async def test_another_orchestrator_continues_the_request(
    up: Deployment, undisturbed: Sequence[Choice], tmp_path: Path, blow: signal.Signals, choices: int
) -> None:
    with _orchestrator(up, tmp_path, drain_s=0.1) as (endpoint, process):
        builder, texts = ResultBuilder(), 0
        async with AsyncClient(endpoint, up.endpoint) as client:
            call = client.generate("hello", seed=SEED, choices=choices)
            async for event in call:
                builder.add(event)
                texts += isinstance(event, Text)
                if texts == STEPS // 4 and isinstance(event, Text):
                    process.send_signal(blow)
            assert client.endpoint == up.endpoint
    _check(builder.build().choices, undisturbed)
    if choices == 1:
        assert _attempts(up, call.request_id) == {1}, "it continues with the running steps"


def test_stopping_lets_running_requests_finish(tmp_path: Path) -> None:
    with deployed(relays(tmp_path, steps=100, step_s=0.02)) as up, up.client() as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate("hello", seed=1).result)
        eventually(lambda: up.load("frames-0").running == 1, timeout_s=20)
        up.process.send_signal(signal.SIGTERM)
        assert len(running.result().text) == 2_000_000


def _attempts(up: Deployment, request_id: str) -> set[int]:
    return {step.attempt for step in steps_of(up, request_id)}


@contextmanager
def _orchestrator(up: Deployment, folder: Path, *, drain_s: float) -> "Generator[tuple[str, subprocess.Popen[bytes]]]":
    """Starts another orchestrator over the same replicas and waits until it serves."""
    endpoint = f"127.0.0.1:{PortPicker().pick()}"
    replicas = {name.rpartition("-")[0]: (ReplicaAddress(name, up.endpoint_of(name)),) for name in up.replicas()}
    pipeline = relays(folder, steps=STEPS, step_s=STEP_S)
    config = OrchestratorConfig(str(pipeline), replicas, endpoint, drain_s=drain_s)
    command = config_command("stagemesh.orchestrator", config, folder / "orchestrator.json")
    with killed_at_end(subprocess.Popen(command)) as process:
        with Client(endpoint) as client:
            eventually(lambda: _serves(client), timeout_s=30)
        yield endpoint, process


def _serves(client: Client) -> bool:
    try:
        stages = client.describe().stages
    except UnavailableError:
        return False
    return all(replica.state == stage_pb2.REPLICA_STATE_READY for stage in stages for replica in stage.replicas)
