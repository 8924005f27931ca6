"""`make cluster` maps the chart to Kubernetes 1.20 without a change of meaning."""

import subprocess
import sys

import pytest

from tests.k8s.helm import CHART, load_objects, read_values, render_text
from tests.k8s.manifests import Manifest
from tests.repository.commands import ROOT

SPEECH = CHART / "ci" / "speech-cpu-values.yaml"


@pytest.fixture(scope="module")
def rendered() -> str:
    return render_text(read_values(SPEECH))


@pytest.fixture(scope="module")
def mapped(rendered: str) -> list[Manifest]:
    command = [sys.executable, str(ROOT / "k8s/cluster/downlevel.py"), "/node/bin"]
    return load_objects(subprocess.run(command, input=rendered, capture_output=True, text=True, check=True).stdout)


def test_disruption_budgets_have_the_version_of_1_20(mapped: list[Manifest]) -> None:
    versions = {item["apiVersion"] for item in mapped if item["kind"] == "PodDisruptionBudget"}
    assert versions == {"policy/v1beta1"}


def test_probes_ask_for_the_health_of_the_same_service(rendered: str, mapped: list[Manifest]) -> None:
    assert _probes(load_objects(rendered)) == _probes(mapped) != {}


def test_every_container_with_a_probe_mounts_the_program(mapped: list[Manifest]) -> None:
    for item in mapped:
        if item["kind"] == "Deployment":
            pod = item["spec"]["template"]["spec"]
            assert {"path": "/node/bin", "type": "Directory"} in [each.get("hostPath") for each in pod["volumes"]]
            for container in pod["containers"]:
                assert "/opt/stagemesh-probe" in [mount["mountPath"] for mount in container["volumeMounts"]]


def test_ranges_of_ports_become_single_ports(rendered: str, mapped: list[Manifest]) -> None:
    assert "endPort" in rendered
    policies = [item for item in mapped if item["kind"] == "NetworkPolicy"]
    ports = [port for item in policies for rule in item["spec"]["ingress"] for port in rule["ports"]]
    assert {18600, 18663} <= {port["port"] for port in ports}
    assert not any("endPort" in port for port in ports)


def _probes(manifests: list[Manifest]) -> dict[tuple[str, str, str], tuple[str, str]]:
    """Returns the port and the health name that each probe asks for, by workload, container and probe."""
    found: dict[tuple[str, str, str], tuple[str, str]] = {}
    for item in manifests:
        for container in item.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ()):
            for name in ("startupProbe", "livenessProbe", "readinessProbe"):
                probe = container[name]
                if "grpc" in probe:
                    asked = (str(probe["grpc"]["port"]), probe["grpc"]["service"])
                else:
                    asked = (probe["exec"]["command"][1].rpartition(":")[2], probe["exec"]["command"][2])
                found[item["metadata"]["name"], container["name"], name] = asked
    return found
