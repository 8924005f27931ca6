"""`engine: external`: replicas by address and by registration, what `up` reports, and stages that break the protocol.

The request or the replica that a broken stage affects ends with an error that names the cause. All others continue.
"""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from anyio.from_thread import start_blocking_portal

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.cli.launcher.process_configs import stage_config
from stagemesh.client import Client
from stagemesh.common.errors import DeadlineError, ExitCode, InternalError, InvalidRequestError, StagemeshError
from stagemesh.common.process.config import dump_config
from stagemesh.common.process.stage_process import OrchestratorAddress
from stagemesh.pipeline import load_pipeline
from stagemesh.v1 import stage_pb2
from tests.children import killed_at_end
from tests.deployment import Deployment, deployed, eventually
from tests.local_mesh import LocalMesh, local_mesh
from tests.system.added_transforms import DOUBLED, add_transform
from tests.system.pipelines import pipeline_file
from tests.system.reading import contents, read
from tests.system.stub_stage import ReplicaFault, RequestFault, serving_stub

SONG = """\
pipeline: song
stages:
  writer:
    engine: fake
    function: source
    replicas: {writers}
    options: {{steps: {steps}, step_s: {step_s}, size_bytes: 30, checkpoint_steps: 1}}
  upper:
    engine: external
    {addresses}
    signature:
      accepts:
        text: uint8[bytes]
      emits:
        text: {{type: "uint8[bytes]", kind: text}}
  frames: {{engine: fake, function: frames}}
edges:
  - {{from: writer, to: upper{edge}}}
  - {{from: upper, to: frames}}
outputs: {{text: upper, frames: frames}}
"""


def song(folder: Path, *addresses: str, edge: str = "", steps: int = 10, step_s: float = 0.0, writers: int = 1) -> Path:
    """Writes the pipeline writer → upper → frames, in which `upper` is external and returns its text.

    `addresses` are the addresses of the replicas of `upper`, and `edge` is the YAML of further keys of the edge to it.
    """
    listed = f"addresses: {json.dumps(addresses)}" if addresses else ""
    text = SONG.format(addresses=listed, edge=edge, steps=steps, step_s=step_s, writers=writers)
    return pipeline_file(folder, text, name="song")


@contextmanager
def external_replica(
    pipeline: Path,
    *,
    listen: str = "127.0.0.1:0",
    admin: str = "",
    name: str = "upper-0",
    engine: str = "fake",
    function: str = "relay",
) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a replica of the stage `upper` in its own process. Registers it at `admin` if that is not empty."""
    loaded = load_pipeline(str(pipeline))
    config = replace(
        stage_config(loaded, loaded.stages["upper"], replica=name, listen=listen),
        engine=engine,
        function=function,
        orchestrators=(OrchestratorAddress(admin),) if admin else (),
    )
    command = [str(Path(sys.executable).with_name("stagemesh")), "serve", "stage", "-"]
    with killed_at_end(subprocess.Popen(command, stdin=subprocess.PIPE)) as process:
        assert process.stdin is not None
        process.stdin.write(dump_config(config))
        process.stdin.close()
        yield process


@contextmanager
def stub_replica(
    pipeline: Path, *, listen: str, name: str = "upper-0", fault: ReplicaFault = ReplicaFault.NONE
) -> Iterator[None]:
    """Runs a replica of the stage `upper` that is made of generated stubs alone, in a thread of this process."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving_stub(load_pipeline(str(pipeline)), listen, name=name, fault=fault)),
    ):
        yield


UPPER = "upper (external)"


def _waits(deployment: Deployment) -> bool:
    return UPPER in deployment.statuses and deployment.statuses[UPPER]["state"] == "waiting"


def _detail(deployment: Deployment) -> str:
    return str(deployment.statuses[UPPER]["detail"])


def test_a_listed_replica_serves_if_its_signature_is_right_and_may_return_after_its_death(tmp_path: Path) -> None:
    address = f"127.0.0.1:{PortPicker().pick()}"
    pipeline = song(tmp_path, address)
    with deployed(pipeline, until=_waits) as deployment:
        deployment.wait(lambda up: f"{address} does not answer" in _detail(up))
        assert "pipeline song, generation " in _detail(deployment)
        with external_replica(pipeline, listen=address, function="talk"):
            deployment.wait(lambda up: up.statuses[UPPER]["state"] == "failed")
            assert "its signature differs from the pipeline file's in sampling" in _detail(deployment)
        with external_replica(pipeline, listen=address):
            deployment.wait(Deployment.all_ready)
            with deployment.client() as client:
                first = client.generate("hello", seed=1).result().text
                upper = next(stage for stage in client.describe().stages if stage.name == "upper")
            assert (upper.engine, upper.replicas[0].name) == ("external", "upper-0")
            assert upper.replicas[0].state == stage_pb2.REPLICA_STATE_READY
        deployment.wait(_waits)
        with external_replica(pipeline, listen=address):
            deployment.wait(Deployment.all_ready)
            with deployment.client() as client:
                assert client.generate("hello", seed=1).result().text == first


def test_a_replica_registers_at_the_address_that_up_reports(tmp_path: Path) -> None:
    admin = f"127.0.0.1:{PortPicker().pick()}"
    pipeline = song(tmp_path)
    with deployed(pipeline, "--admin-port", admin.rpartition(":")[2], until=_waits) as deployment:
        assert f"to register at {admin} as pipeline song, generation " in _detail(deployment)
        with external_replica(pipeline, admin=admin):
            deployment.wait(Deployment.all_ready)
            with deployment.client() as client:
                assert client.generate("hello", seed=1).result().text


def test_serve_refuses_to_run_an_external_stage(tmp_path: Path) -> None:
    with external_replica(song(tmp_path), engine="external") as process:
        assert process.wait(timeout=30) == ExitCode.USAGE


def test_nothing_is_lost_when_either_end_of_a_transform_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_transform(tmp_path, monkeypatch, name="doubled", source=DOUBLED)
    address = f"127.0.0.1:{PortPicker().pick()}"
    pipeline = song(tmp_path, address, edge=", transform: doubled", steps=40, step_s=0.02, writers=2)
    with deployed(pipeline, until=_waits) as deployment, ExitStack() as running:
        process = running.enter_context(external_replica(pipeline, listen=address))
        deployment.wait(Deployment.all_ready)

        def restart_upper() -> None:
            process.kill()
            running.enter_context(external_replica(pipeline, listen=address))

        def kill_writer() -> None:
            deployment.kill(next(name for name in ("writer-0", "writer-1") if deployment.load(name).running))

        with deployment.client() as client:
            undisturbed = client.generate("hello", seed=3).result()
            assert "SStteepp  00  iiss" in undisturbed.text
            for disturb in (kill_writer, restart_upper):
                assert contents(read(client.generate("hello", seed=3), {10: disturb})) == contents(undisturbed)


TIMEOUT_S = 2.5


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalMesh]:
    address = f"127.0.0.1:{PortPicker().pick()}"
    pipeline = song(tmp_path_factory.mktemp("song"), address, step_s=0.01)
    with stub_replica(pipeline, listen=address), local_mesh(pipeline) as deployment:
        # The first request connects the stages, which must not use up the deadline of the first fault.
        with deployment.client() as client:
            assert client.generate("hello", seed=1, timeout_s=20).result().text
        yield deployment


class Case(NamedTuple):
    """The error of a request, and a part of its message."""

    error: type[StagemeshError]
    message: str
    reason: str = ""


CASES: Mapping[RequestFault, Case] = {
    RequestFault.NO_CREDIT: Case(DeadlineError, "stage 'writer' waits for credit from upper-0 on edge writer->upper"),
    RequestFault.NO_REPLIES: Case(DeadlineError, "stage 'writer' waits for upper-0 to accept edge writer->upper"),
    RequestFault.NO_ACCEPTANCE: Case(DeadlineError, "stage 'upper' waits for upper-0 to accept the request"),
    RequestFault.NO_END: Case(DeadlineError, "stage 'frames' waits for chunk 0 of edge upper->frames from upper-0"),
    RequestFault.EXCEPTION: Case(InternalError, "the stub divides by zero", "INTERNAL"),
    RequestFault.WRONG_KIND: Case(InternalError, "it is token_ids, and must be text", "INVALID_RESULT"),
    RequestFault.UNAUTHENTICATED: Case(InternalError, "'upper' rejected the orchestrator: who are you?", "INTERNAL"),
    RequestFault.REJECTED_DIGEST: Case(InvalidRequestError, "edge writer->upper ended with", "DIGEST_MISMATCH"),
    RequestFault.WRONG_DIGEST: Case(
        InvalidRequestError, "edge upper->frames ended after 10 chunks, but", "DIGEST_MISMATCH"
    ),
}


@pytest.mark.parametrize("fault", CASES)
def test_a_fault_ends_its_own_request_alone(up: LocalMesh, fault: RequestFault) -> None:
    expected = CASES[fault]
    with up.client() as client, ThreadPoolExecutor(1) as threads:
        failing = threads.submit(_failure, client, f"{fault.value}.1")
        result = client.generate("hello", seed=1, timeout_s=20).result()
        assert len(result.text) == 300
        error = failing.result()
        assert isinstance(error, expected.error), error.message
        assert expected.message in error.message
        assert error.reason == (expected.reason or "DEADLINE_EXCEEDED")
        assert error.metadata.get("edge", "") in expected.message
        assert client.generate("hello", seed=1, timeout_s=20).result().text == result.text
    eventually(lambda: all(_is_idle(up, name) for name in ("writer-0", "frames-0")), timeout_s=10)


REFUSALS: Mapping[ReplicaFault, str] = {
    ReplicaFault.SIGNATURE: "its signature differs from the pipeline file's in emits",
    ReplicaFault.VERSION: "speaks wire versions 7 to 9",
}


@contextmanager
def _good_and_bad(folder: Path, fault: ReplicaFault) -> Iterator[Path]:
    """Runs two replicas of `upper`, of which one makes a mistake. Yields their pipeline file."""
    bad, good = (f"127.0.0.1:{PortPicker().pick()}" for _ in range(2))
    pipeline = song(folder, bad, good)
    with stub_replica(pipeline, listen=bad, name="upper-1", fault=fault), stub_replica(pipeline, listen=good):
        yield pipeline


@pytest.mark.parametrize("fault", REFUSALS)
def test_a_replica_that_cannot_take_part_gets_no_requests(tmp_path: Path, fault: ReplicaFault) -> None:
    with _good_and_bad(tmp_path, fault) as pipeline, local_mesh(pipeline) as up, up.client() as client:
        eventually(lambda: REFUSALS[fault] in _details(client), timeout_s=30)
        for _ in range(3):
            assert client.generate("hello", timeout_s=20).result().text


def test_up_names_a_replica_that_does_not_answer(tmp_path: Path) -> None:
    port = PortPicker().pick()
    with (
        _good_and_bad(tmp_path, ReplicaFault.NO_DESCRIPTION) as pipeline,
        deployed(pipeline, f"--port={port}", until=_names_silent_replica),
        Client(f"127.0.0.1:{port}") as client,
    ):
        for _ in range(3):
            assert client.generate("hello", timeout_s=20).result().text


def _names_silent_replica(up: Deployment) -> bool:
    return UPPER in up.statuses and "does not answer" in _detail(up)


def test_a_stage_of_the_minimum_profile_may_die_and_return(tmp_path: Path) -> None:
    address = f"127.0.0.1:{PortPicker().pick()}"
    pipeline = song(tmp_path, address, steps=40, step_s=0.02)
    with ExitStack() as running:
        stub = running.enter_context(ExitStack())
        stub.enter_context(stub_replica(pipeline, listen=address))
        deployment = running.enter_context(local_mesh(pipeline))
        with deployment.client() as client:
            undisturbed = client.generate("hello", seed=1).result().text
            with ThreadPoolExecutor(1) as threads:
                running_request = threads.submit(lambda: client.generate("hello", seed=1, timeout_s=60).result().text)
                eventually(lambda: not _is_idle(deployment, "writer-0"), timeout_s=10)
                stub.close()
                stub.enter_context(stub_replica(pipeline, listen=address))
                assert running_request.result() == undisturbed


def _failure(client: Client, request_id: str) -> StagemeshError:
    with pytest.raises(StagemeshError) as caught:
        client.generate("hello", request_id=request_id, timeout_s=TIMEOUT_S).result()
    return caught.value


def _is_idle(up: LocalMesh, name: str) -> bool:
    load = up.load(name)
    return load.running == load.queued == load.arena_used_bytes == 0


def _details(client: Client) -> str:
    return " ".join(replica.detail for stage in client.describe().stages for replica in stage.replicas)
