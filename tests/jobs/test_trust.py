from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh.cli.launcher.certificates import Authority
from stagemesh.client import Client
from stagemesh.common.errors import NotFoundError, PermissionDeniedError
from tests.deployment import Deployment, deployed
from tests.jobs.servers import write_pipeline
from tests.module_fixtures import made_for_module
from tests.rpc.call_errors import raises

pytestmark = pytest.mark.timeout(180)


folder = made_for_module(Path)


@pytest.fixture(scope="module")
def up(folder: Path) -> Iterator[Deployment]:
    with deployed(write_pipeline(folder), "--jobs", "--tls", str(folder / "authority"), home=folder / "home") as up:
        yield up


def client_of(up: Deployment, folder: Path, name: str) -> Client:
    authority = Authority(folder / "authority")
    return Client(up.endpoint, tls=authority.issue(folder / name, [f"client/{name}"]))


def test_a_job_belongs_to_the_name_in_the_certificate(up: Deployment, folder: Path, tmp_path: Path) -> None:
    with client_of(up, folder, "alice") as alice, client_of(up, folder, "bob") as bob:
        assert alice.jobs.submit("hello", request_id="mine").caller == "alice"
        job = list(alice.jobs.watch("mine"))[-1]
        assert job.state == "succeeded"
        assert len(alice.jobs.download(job, tmp_path)) == 1
        with raises(NotFoundError, reason="UNKNOWN_JOB"):
            bob.jobs.get("mine")
        assert list(bob.jobs.list()) == []


def test_a_caller_cannot_state_another_name(up: Deployment, folder: Path) -> None:
    with client_of(up, folder, "bob") as bob:
        with raises(PermissionDeniedError, reason="CALLER_MISMATCH"):
            bob.jobs.get("mine", caller="alice")
        with pytest.raises(PermissionDeniedError):
            bob.jobs.submit("hello", caller="alice")
