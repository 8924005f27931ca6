from pathlib import Path

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from stagemesh.orchestrator.admin.service import AdminServicer
from stagemesh.orchestrator.membership.registration import MembershipServicer
from stagemesh.orchestrator.servicer import OrchestratorServicer
from stagemesh.services.stage.service.control_servicer import StageControlServicer
from stagemesh.services.stage.service.servicer import StageServicer
from stagemesh.v1 import admin_pb2, control_pb2, membership_pb2, orchestrator_pb2, stage_pb2
from tests.repository.commands import ROOT, run

STUBS = ROOT / "protos" / "stagemesh" / "v1"
SERVICERS = {
    stage_pb2.DESCRIPTOR.services_by_name["StageService"]: StageServicer,
    control_pb2.DESCRIPTOR.services_by_name["StageControlService"]: StageControlServicer,
    orchestrator_pb2.DESCRIPTOR.services_by_name["OrchestratorService"]: OrchestratorServicer,
    membership_pb2.DESCRIPTOR.services_by_name["MembershipService"]: MembershipServicer,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"]: AdminServicer,
}


def read_stubs(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("*_pb2*.py*")}


def test_the_committed_stubs_and_error_catalogue_match_the_protos(tmp_path: Path) -> None:
    run("make", "--no-print-directory", "stubs", f"OUT={tmp_path}", f"DOCS={tmp_path}")
    assert read_stubs(tmp_path / "stagemesh" / "v1") == read_stubs(STUBS)
    assert (tmp_path / "errors.md").read_text() == (ROOT / "docs" / "errors.md").read_text()


def test_the_protos_are_formatted_and_linted() -> None:
    run("buf", "format", "--diff", "--exit-code")
    run("buf", "lint")


@pytest.mark.parametrize(
    ("service", "servicer"), SERVICERS.items(), ids=["stage", "control", "orchestrator", "membership", "admin"]
)
def test_every_rpc_is_served(service: ServiceDescriptor, servicer: type) -> None:
    missing = [method.name for method in service.methods if method.name not in vars(servicer)]
    assert not missing
