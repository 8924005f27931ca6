"""`engine: external` under `stagemesh up`: replicas by address and by registration, and what `up` reports."""

from contextlib import ExitStack
from pathlib import Path

import pytest

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.common.errors import ExitCode
from stagemesh.v1 import stage_pb2
from tests.deployment import Deployment, deployed
from tests.system.added_transforms import DOUBLED, add_transform
from tests.system.external import external_replica, song
from tests.system.reading import contents, read

UPPER = "upper (external)"


def _waits(deployment: Deployment) -> bool:
    return UPPER in deployment.statuses and deployment.statuses[UPPER]["state"] == "waiting"


def _detail(deployment: Deployment) -> str:
    return str(deployment.statuses[UPPER]["detail"])


def test_a_listed_replica_serves_if_its_signature_is_right_and_may_return_after_its_death(tmp_path: Path) -> None:
    address = f"127.0.0.1:{PortPicker().pick()}"
    pipeline = song(tmp_path, addresses=f'["{address}"]')
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


def test_nothing_is_lost_when_either_end_of_a_transform_at_the_producer_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_transform(tmp_path, monkeypatch, name="doubled", source=DOUBLED)
    address = f"127.0.0.1:{PortPicker().pick()}"
    edge = ", transform: doubled"
    pipeline = song(tmp_path, addresses=f'["{address}"]', edge=edge, steps=40, step_s=0.02, writers=2)
    with deployed(pipeline, until=_waits) as deployment, ExitStack() as running:
        process = running.enter_context(external_replica(pipeline, listen=address))
        deployment.wait(Deployment.all_ready)

        def restart_upper() -> None:
            process.kill()
            running.enter_context(external_replica(pipeline, listen=address))

        def kill_writer() -> None:
            writers = ("writer-0", "writer-1")
            deployment.kill(next(name for name in writers if deployment.load(name).running))

        with deployment.client() as client:
            undisturbed = client.generate("hello", seed=3).result()
            assert "SStteepp  00  iiss" in undisturbed.text
            for disturb in (kill_writer, restart_upper):
                assert contents(read(client.generate("hello", seed=3), {10: disturb})) == contents(undisturbed)
