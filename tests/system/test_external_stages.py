"""`engine: external` under `stagemesh up`: replicas by address and by registration, and what `up` reports."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

import pytest

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.client import Admitted, Client, Result, Text
from stagemesh.client.responses import ResultBuilder
from stagemesh.common.errors import ExitCode
from stagemesh.v1 import stage_pb2
from tests.deployment import Deployment, deployed
from tests.system.added_transforms import DOUBLED, add_transform
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

        with deployment.client() as client:
            undisturbed = _disturbed(client, lambda _: None)
            assert "SStteepp  00  iiss" in undisturbed.text
            for disturb in (lambda replicas: deployment.kill(replicas["writer"]), lambda _: restart_upper()):
                assert _contents(_disturbed(client, disturb)) == _contents(undisturbed)


def _disturbed(client: Client, disturb: Callable[[Mapping[str, str]], object]) -> Result:
    """Runs a request. Passes the names of its replicas by stage to `disturb` when some of the text has arrived."""
    builder, replicas = ResultBuilder(), dict[str, str]()
    texts = 0
    for event in client.generate("hello", seed=3):
        builder.add(event)
        if isinstance(event, Admitted):
            replicas.update(event.replicas)
        texts += isinstance(event, Text)
        if texts == 10 and isinstance(event, Text):
            disturb(replicas)
    return builder.build()


def _contents(result: Result) -> tuple[str, bytes]:
    return result.text, b"".join(output.tensor.tobytes() for output in result.tensors["frames"])
