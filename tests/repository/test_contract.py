import re
import shutil
from pathlib import Path

import pytest
from google.protobuf.descriptor import ServiceDescriptor

from stagemesh.jobs.servicer import JobServicer
from stagemesh.orchestrator.admin.servicer import AdminServicer
from stagemesh.orchestrator.fleet.membership import MembershipServicer
from stagemesh.orchestrator.servicer import OrchestratorServicer
from stagemesh.rpc.callers import roles_of
from stagemesh.services.media.service import MediaServicer
from stagemesh.services.stage.control_servicer import StageControlServicer
from stagemesh.services.stage.servicer import StageServicer
from stagemesh.v1 import (
    admin_pb2,
    control_pb2,
    jobs_pb2,
    media_pb2,
    membership_pb2,
    orchestrator_pb2,
    roles_pb2,
    stage_pb2,
)
from tests.repository.commands import ROOT, run

STUBS = ROOT / "protos" / "stagemesh" / "v1"
SERVICERS = {
    stage_pb2.DESCRIPTOR.services_by_name["StageService"]: StageServicer,
    control_pb2.DESCRIPTOR.services_by_name["StageControlService"]: StageControlServicer,
    orchestrator_pb2.DESCRIPTOR.services_by_name["OrchestratorService"]: OrchestratorServicer,
    membership_pb2.DESCRIPTOR.services_by_name["MembershipService"]: MembershipServicer,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"]: AdminServicer,
    media_pb2.DESCRIPTOR.services_by_name["MediaService"]: MediaServicer,
    jobs_pb2.DESCRIPTOR.services_by_name["JobService"]: JobServicer,
}


def read_stubs(protos: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in (protos / "stagemesh" / "v1").glob("*_pb2*.py*")}


def test_the_committed_stubs_and_error_catalogue_match_the_protos(tmp_path: Path) -> None:
    run("make", "--no-print-directory", "stubs", f"OUT={tmp_path}", f"DOCS={tmp_path}")
    assert read_stubs(tmp_path) == read_stubs(ROOT / "protos")
    assert (tmp_path / "errors.md").read_text() == (ROOT / "docs" / "errors.md").read_text()


def test_every_service_of_the_contract_has_a_servicer() -> None:
    protos = "".join(path.read_text() for path in (ROOT / "protos").rglob("*.proto"))
    assert sorted(re.findall(r"^service (\w+)", protos, re.MULTILINE)) == sorted(each.name for each in SERVICERS)


def test_the_protos_are_formatted_and_linted() -> None:
    run("buf", "format", "--diff", "--exit-code")
    run("buf", "lint")


def test_the_contract_does_not_break() -> None:
    run("buf", "breaking", "--against", "protos/contract.binpb")


_BREAKS = {
    "a field with another number": ("uint64 seq = 2;", "uint64 seq = 7;"),
    "a field with another type": ("uint64 seq = 2;", "int64 seq = 2;"),
    "a field that is gone": ("  uint64 offset = 4;\n", ""),
    "a value that is gone": ("  CONNECTOR_SHM = 2;\n", ""),
}


@pytest.mark.parametrize(("present", "changed"), _BREAKS.values(), ids=_BREAKS)
def test_a_break_of_the_contract_is_noticed(present: str, changed: str, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "protos", tmp_path / "protos")
    shutil.copy(ROOT / "buf.yaml", tmp_path)
    chunk = tmp_path / "protos" / "stagemesh" / "v1" / "chunk.proto"
    text = chunk.read_text()
    assert present in text
    chunk.write_text(text.replace(present, changed))
    with pytest.raises(AssertionError, match=r"chunk\.proto:"):
        run("buf", "breaking", str(tmp_path), "--against", str(ROOT / "protos" / "contract.binpb"))


def test_generated_clients_in_python_match_the_committed_stubs() -> None:
    # A protobuf release has one version for all languages (31.1), and one for Python (6.31.1).
    protobuf = re.findall(r"# Protobuf Python Version: \d+\.(.*)", (STUBS / "stage_pb2.py").read_text())
    grpc = re.findall(r"GRPC_GENERATED_VERSION = '(.*)'", (STUBS / "stage_pb2_grpc.py").read_text())
    plugins = re.findall(r"(protocolbuffers|grpc)/python:v(.*)", (ROOT / "buf.gen.yaml").read_text())
    assert plugins == [("protocolbuffers", *protobuf), ("grpc", *grpc)]


@pytest.mark.parametrize(("service", "servicer"), SERVICERS.items(), ids=[service.name for service in SERVICERS])
def test_every_rpc_is_served(service: ServiceDescriptor, servicer: type) -> None:
    assert [method.name for method in service.methods if method.name not in vars(servicer)] == []


@pytest.mark.parametrize("service", SERVICERS, ids=lambda service: service.name)
def test_every_rpc_names_the_roles_of_its_callers(service: ServiceDescriptor) -> None:
    roles = {method.name: roles_of(f"/{service.full_name}/{method.name}") for method in service.methods}
    assert all(roles.values()), roles
    assert roles_pb2.CALLER_ROLE_UNSPECIFIED not in frozenset().union(*roles.values())
