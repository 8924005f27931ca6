"""A pipeline of fake stages as real processes: results, cancellation, kills, restarts and limits."""

import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from stagemesh.client import AsyncClient, Result, Text
from stagemesh.common.errors import (
    CancelledRequestError,
    DeadlineError,
    ExistsError,
    ExitCode,
    InternalError,
    InvalidRequestError,
    OverloadedError,
)
from tests.deployment import Deployment, deployed, eventually
from tests.system.pipelines import relays

STEPS, STEP_S = 500, 0.02
"""A request that takes ten seconds."""


def _frames(result: Result) -> bytes:
    return b"".join(output.tensor[:, 0].astype("u1").tobytes() for output in result.tensors["frames"])


@pytest.mark.parametrize("connector", ["shm", "grpc"])
def test_outputs_agree_over_every_connector(tmp_path: Path, connector: str) -> None:
    with deployed(relays(tmp_path, connector=connector)) as up, up.client() as client:
        result = client.generate("hello", seed=1).result()
        assert _frames(result) == result.text.encode()
        assert result.text.startswith("Step 0 is ")
        assert len(result.text) == 200_000
        assert {edge.connector for edge in result.finished.edges} == {connector}
        eventually(up.idle, timeout_s=10)


def test_eight_requests_at_once_never_mix(tmp_path: Path) -> None:
    with deployed(relays(tmp_path, step_s=0.01)) as up, up.client() as client, ThreadPoolExecutor(8) as pool:
        prompts = [f"prompt {n}" for n in range(8)]
        alone = {prompt: client.generate(prompt, seed=5).result().text for prompt in prompts}
        results = dict(zip(prompts, pool.map(lambda p: client.generate(p, seed=5).result(), prompts), strict=True))
        assert len(set(alone.values())) == 8
        for prompt, result in results.items():
            assert result.text == alone[prompt]
            assert _frames(result) == alone[prompt].encode()
        eventually(up.idle, timeout_s=10)


def test_a_client_that_disconnects_stops_every_stage(tmp_path: Path) -> None:
    with deployed(relays(tmp_path, steps=STEPS, step_s=STEP_S)) as up, up.client() as client:
        for event in client.generate("hello"):
            if isinstance(event, Text):
                break
        eventually(up.idle, timeout_s=10)


def test_cancelled_request_stops_every_stage(tmp_path: Path) -> None:
    with (
        deployed(relays(tmp_path, steps=STEPS, step_s=STEP_S)) as up,
        up.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(client.generate("hello", request_id="r1").result)
        eventually(lambda: up.load("frames-0").running == 1, timeout_s=20)
        client.cancel("r1")
        with pytest.raises(CancelledRequestError):
            running.result()
        eventually(up.idle, timeout_s=10)


@pytest.mark.parametrize("victim", ["source", "relay", "frames"])
def test_a_killed_stage_restarts_and_the_request_continues(tmp_path: Path, victim: str) -> None:
    with (
        deployed(relays(tmp_path, steps=150, step_s=STEP_S)) as up,
        up.client() as client,
        ThreadPoolExecutor(1) as pool,
    ):
        running = pool.submit(client.generate("hello", seed=1).result)
        eventually(lambda: up.load("frames-0").running == 1, timeout_s=20)
        first = up.process_id(f"{victim}-0")
        up.kill(f"{victim}-0")
        result = running.result(timeout=45)
        assert up.process_id(f"{victim}-0") != first
        assert result.text == client.generate("hello", seed=1).result().text
        assert _frames(result) == result.text.encode()
        eventually(up.idle, timeout_s=10)


def test_failing_stage_ends_the_request_with_its_cause(tmp_path: Path) -> None:
    with deployed(relays(tmp_path, fail=", options: {fail_at_step: 3}")) as up, up.client() as client:
        with pytest.raises(InternalError, match="fails at step 3") as caught:
            client.generate("hello").result()
        assert caught.value.metadata["stage"] == "frames"
        eventually(up.idle, timeout_s=10)


def test_a_request_beyond_the_limit_is_rejected_with_a_time_to_retry(tmp_path: Path) -> None:
    with (
        deployed(relays(tmp_path, steps=STEPS, step_s=STEP_S, max_in_flight=2, max_queued=0)) as up,
        up.client() as client,
        ThreadPoolExecutor(2) as pool,
    ):
        running = [pool.submit(client.generate("hello", request_id=f"r{n}").result) for n in range(2)]
        eventually(lambda: up.load("frames-0").running == 2, timeout_s=20)
        with pytest.raises(OverloadedError) as caught:
            client.generate("one too many", timeout_s=0.5).result()
        assert caught.value.retry_after_s is not None
        for n, future in enumerate(running):
            client.cancel(f"r{n}")
            assert isinstance(future.exception(), CancelledRequestError)


async def test_the_same_request_attaches_and_another_is_rejected(tmp_path: Path) -> None:
    with deployed(relays(tmp_path, step_s=0.02)) as up:
        async with AsyncClient(up.endpoint) as client:
            first = aiter(client.generate("hello", request_id="twice", seed=1))
            await anext(first)
            second = await client.generate("hello", request_id="twice", seed=1).result()
            with pytest.raises(ExistsError):
                await client.generate("other", request_id="twice", seed=1).result()
            rest = [event.delta async for event in first if isinstance(event, Text)]
            assert "".join(rest) == second.text


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": ""}, InvalidRequestError, "prompt"),
        ({"prompt": "x", "outputs": ["video"]}, InvalidRequestError, "video"),
        ({"prompt": "x", "options": {"speed": 2.0}}, InvalidRequestError, "speed"),
        ({"prompt": "x", "request_id": "a b"}, InvalidRequestError, "request_id"),
        ({"prompt": "x", "timeout_s": 0.0}, DeadlineError, "timeout_s"),
        ({"prompt": "x" * (9 << 20)}, InvalidRequestError, "bytes"),
    ],
)
def test_errors_of_bad_requests_name_the_remedy(
    shared: Deployment, arguments: dict[str, object], error: type[Exception], message: str
) -> None:
    with shared.client() as client, pytest.raises(error, match=message):
        client.generate(**arguments).result()  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> object:
    with deployed(relays(tmp_path_factory.mktemp("shared"))) as up:
        yield up


def test_stopping_lets_running_requests_finish(tmp_path: Path) -> None:
    with deployed(relays(tmp_path, steps=100, step_s=0.02)) as up, up.client() as client, ThreadPoolExecutor(1) as pool:
        running = pool.submit(client.generate("hello", seed=1).result)
        eventually(lambda: up.load("frames-0").running == 1, timeout_s=20)
        up.process.send_signal(signal.SIGTERM)
        assert len(running.result().text) == 2_000_000


def test_no_process_is_left_when_up_is_killed(tmp_path: Path) -> None:
    before = set(Path("/dev/shm").iterdir())
    with pytest.raises(AssertionError, match="status -9"), deployed(relays(tmp_path)) as up:
        children = psutil.Process(up.process.pid).children(recursive=True)
        # The orchestrator, the stages, and the process that forks them.
        assert len(children) == 5
        up.process.send_signal(signal.SIGKILL)
        gone, alive = psutil.wait_procs(children, timeout=5)
        assert not alive
        assert len(gone) == 5
    assert set(Path("/dev/shm").iterdir()) <= before


def test_up_names_a_port_that_is_in_use(tmp_path: Path, shared: Deployment) -> None:
    port = shared.endpoint.rsplit(":", 1)[1]
    stagemesh = str(Path(sys.executable).with_name("stagemesh"))
    command = [stagemesh, "up", str(relays(tmp_path)), "--port", port]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert refused.returncode == ExitCode.REFUSED
    assert port in refused.stderr
    assert "--port" in refused.stderr
