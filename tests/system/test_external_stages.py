"""`engine: external` under `stagemesh up`: replicas by address and by registration, and what `up` reports."""

from pathlib import Path

from stagemesh.common.exit_codes import ExitCode
from stagemesh.orchestrator.launcher.ports import PortPicker
from stagemesh.v1 import stage_pb2
from tests.deployment import Deployment, deployed
from tests.system.external import external_replica, song

UPPER = "upper (external)"


def _waits(deployment: Deployment) -> bool:
    return UPPER in deployment.statuses and deployment.statuses[UPPER]["state"] == "waiting"


def _detail(deployment: Deployment) -> str:
    return str(deployment.statuses[UPPER]["detail"])


def test_a_listed_replica_serves_and_may_return_after_its_death(tmp_path: Path) -> None:
    address = f"127.0.0.1:{PortPicker().pick()}"
    pipeline = song(tmp_path, addresses=f'["{address}"]')
    with deployed(pipeline, until=_waits) as deployment:
        deployment.wait(lambda up: f"{address} does not answer" in _detail(up))
        assert "pipeline song, generation " in _detail(deployment)
        with external_replica(pipeline, listen=address):
            deployment.wait(Deployment.all_ready)
            with deployment.client() as client:
                first = client.generate("hello", seed=1).result().text
                upper = next(stage for stage in client.describe().stages if stage.name == "upper")
            assert (upper.engine, upper.replicas[0].name) == ("external", "upper-0")
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


def test_a_replica_whose_signature_differs_is_refused(tmp_path: Path) -> None:
    address = f"127.0.0.1:{PortPicker().pick()}"
    pipeline = song(tmp_path, addresses=f'["{address}"]')
    with deployed(pipeline, until=_waits) as deployment:
        with external_replica(pipeline, listen=address, function="talk"):
            deployment.wait(lambda up: up.statuses[UPPER]["state"] == "failed")
            assert "its signature differs from the pipeline file's in sampling" in _detail(deployment)
        with external_replica(pipeline, listen=address):
            deployment.wait(Deployment.all_ready)
            with deployment.client() as client:
                replica = next(stage for stage in client.describe().stages if stage.name == "upper").replicas[0]
            assert replica.state == stage_pb2.REPLICA_STATE_READY


def test_serve_refuses_to_run_an_external_stage(tmp_path: Path) -> None:
    with external_replica(song(tmp_path), engine="external") as process:
        assert process.wait(timeout=30) == ExitCode.USAGE
