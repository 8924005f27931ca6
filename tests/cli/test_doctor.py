"""`stagemesh doctor`: the rules, and a running deployment."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stagemesh.cli.operation.diagnosis import Deployment, Finding, Severity, diagnose
from stagemesh.common.errors import ExitCode
from stagemesh.rpc.process_control import host_report
from stagemesh.v1 import admin_pb2, chunk_pb2, control_pb2, orchestrator_pb2
from tests.cli.commands import Ran, invoke
from tests.credentials import issue, process_credentials
from tests.deployment import Deployment as Running

_GIB = 1 << 30
_NOW_S = 1_800_000_000.0
_A, _B, _SELF = "a-0 on node-1", "b-0 on node-1", "@orchestrator, against this machine"
_LATER_S = _NOW_S + 3 * 86_400


def _process(name: str, stage: str, **report: Any) -> admin_pb2.ProcessReport:
    sound: dict[str, Any] = {
        "software": "stagemesh 1",
        "packages": {"torch": "2.13.0"},
        "host": "node-1",
        "available_bytes": 8 * _GIB,
        "shm_bytes": _GIB,
        "shm_free_bytes": _GIB,
        "open_files": 65536,
        "locked_bytes": 8 << 20,
        "time_s": _NOW_S,
    }
    return admin_pb2.ProcessReport(process=name, stage=stage, report=control_pb2.HostReport(**{**sound, **report}))


def _deployment() -> Deployment:
    """Returns a deployment without problems. Its edge uses nixl, with RDMA."""
    device: dict[str, Any] = {"rdma_devices": ["mlx5_0"]}
    processes = [_process("@orchestrator", ""), _process("a-0", "a", **device), _process("a-1", "a", **device)]
    processes.append(_process("b-0", "b", **device))
    for each in processes:
        if each.stage:
            each.report.ClearField("locked_bytes")
    links = [
        orchestrator_pb2.EdgeLink(producer=producer, consumer="b-0", connector=chunk_pb2.CONNECTOR_NIXL)
        for producer in ("a-0", "a-1")
    ]
    edge = admin_pb2.EdgeStatus(edge=orchestrator_pb2.EdgeDescription(name="a->b", links=links))
    stages = [
        admin_pb2.StageStatus(name=name, replicas=count, ready=count, generations={"g": count})
        for name, count in (("a", 2), ("b", 1))
    ]
    return Deployment(stages, [edge], processes, now_s=_NOW_S, now_error_s=0.01)


def test_a_sound_deployment_has_no_findings() -> None:
    assert diagnose(_deployment()) == []


def _set(number: int, **values: Any) -> Callable[[Deployment], None]:
    """Returns a function that sets fields of the report of a process."""

    def change(found: Deployment) -> None:
        for name, value in values.items():
            setattr(found.processes[number].report, name, value)

    return change


def _stop(found: Deployment) -> None:
    found.stages[1].ready = 0


def _upgrade(found: Deployment) -> None:
    found.stages[0].generations["h"] = 1


def _break_link(found: Deployment) -> None:
    found.edges[0].edge.links[0].error.message = "no route"


def _silence(found: Deployment) -> None:
    found.processes[3].ClearField("report")
    found.processes[3].error.CopyFrom(chunk_pb2.Error(code=14, message="b-0 cannot be reached"))


def _replace(found: Deployment) -> None:
    found.processes[3].ClearField("report")
    found.processes[3].error.CopyFrom(chunk_pb2.Error(code=12, message="unknown method"))


def _put_clock_back(found: Deployment) -> None:
    found.processes[1].clock_ahead_s, found.processes[1].clock_error_s = -3.0, 0.2


def _mix_versions(found: Deployment) -> None:
    found.processes[2].report.packages["torch"] = "2.14.0"


def _remove_device(found: Deployment) -> None:
    del found.processes[1].report.rdma_devices[:]


ERROR, WARNING = Severity.ERROR, Severity.WARNING
PROBLEMS: dict[str, tuple[Callable[[Deployment], None], tuple[Severity, str, str]]] = {
    "no replica": (_stop, (ERROR, "b", "none of its 1 replicas accepts requests")),
    "two generations": (_upgrade, (WARNING, "a", "its replicas are of 2 generations")),
    "no connector": (_break_link, (ERROR, "a->b: a-0 to b-0", "no connector works: no route")),
    "no answer": (_silence, (ERROR, "b-0", "it does not report: b-0 cannot be reached")),
    "external stage": (_replace, (WARNING, "b-0", "it does not report: unknown method")),
    "clock": (_put_clock_back, (WARNING, "a-0", "its clock is 3.0 s behind")),
    "own clock": (_set(0, time_s=_NOW_S + 90), (WARNING, _SELF, "its clock is 90.0 s ahead")),
    "software": (_set(1, software="stagemesh 2"), (WARNING, "all processes", "they run different versions")),
    "package": (_mix_versions, (WARNING, "a", "different versions of torch: 2.13.0 (a-0); 2.14.0 (a-1)")),
    "expired": (_set(1, certificate_expires_at_s=_NOW_S - 1), (ERROR, _A, "its certificate has expired")),
    "soon expired": (_set(1, certificate_expires_at_s=_LATER_S), (WARNING, _A, "its certificate expires in 3.0 d")),
    "files": (_set(0, open_files=1024), (WARNING, "@orchestrator on node-1", "it may open only 1,024 files")),
    "memory": (_set(3, available_bytes=100 << 20), (WARNING, _B, "only 100 MiB of memory are left")),
    "shared memory": (_set(3, shm_free_bytes=10 << 20), (WARNING, _B, "only 10 of 1,024 MiB of /dev/shm are free")),
    "no device": (_remove_device, (WARNING, _A, "it uses nixl without an RDMA device")),
    "locked memory": (_set(1, locked_bytes=8 << 20), (WARNING, _A, "it may lock only 8 MiB of memory")),
    "transports": (_set(1, ucx_tls="tcp"), (WARNING, _A, "UCX_TLS is tcp")),
}


@pytest.mark.parametrize(("change", "expected"), PROBLEMS.values(), ids=PROBLEMS)
def test_each_problem_is_found(change: Callable[[Deployment], None], expected: tuple[Severity, str, str]) -> None:
    found = _deployment()
    change(found)
    (finding,) = diagnose(found)
    severity, where, problem = expected
    assert finding[:2] == (severity, where)
    assert problem in finding.problem
    assert finding.remedy


def test_a_clock_that_may_be_right_is_no_problem() -> None:
    found = _deployment()
    found.processes[1].clock_ahead_s, found.processes[1].clock_error_s = -3.0, 2.5
    assert diagnose(found) == []


def test_errors_come_first() -> None:
    found = _deployment()
    _mix_versions(found)
    _stop(found)
    assert [finding.severity for finding in diagnose(found)] == [ERROR, WARNING]


def test_the_report_of_a_process_with_a_certificate(tmp_path: Path) -> None:
    with process_credentials(issue(tmp_path, "stage/a/a-0", hours=1)):
        report = host_report()
    assert abs(report.certificate_expires_at_s - time.time() - 3600) < 60
    assert not host_report().HasField("certificate_expires_at_s")
    assert report.shm_bytes >= report.shm_free_bytes
    assert report.packages["grpcio"]


def _doctor(relays_up: Running, *arguments: str) -> Ran:
    return invoke("doctor", "--server", relays_up.admin_endpoint, *arguments)


def test_a_running_deployment(relays_up: Running) -> None:
    document = json.loads(_doctor(relays_up, "--json").output)
    assert (document["processes"], len(document["hosts"])) == (4, 1)
    assert "processes: 4, hosts: 1, problems: " in _doctor(relays_up).stdout


def test_a_stage_without_replicas_is_an_error(relays_up: Running) -> None:
    assert invoke("admin", "drain", "frames", "--force", "--server", relays_up.admin_endpoint).exit_code == 0
    try:
        ran = _doctor(relays_up, "--json")
        assert ran.exit_code == ExitCode.FAILED
        first = json.loads(ran.stdout)["findings"][0]
        assert Finding(**{**first, "severity": ERROR}).where == "frames"
        assert first["severity"] == "error"
        text = _doctor(relays_up).stdout
        assert "none of its 1 replicas accepts requests" in text
        assert "stagemesh admin replicas" in text
    finally:
        invoke("admin", "resume", "frames", "--server", relays_up.admin_endpoint)
