"""The ports of a deployment with certificates, whose edges cannot use shared memory."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.deployment import Deployment, deployed
from tests.ports import family, listening
from tests.system.pipelines import relays

STAGEMESH = str(Path(sys.executable).with_name("stagemesh"))


def _pipeline(folder: Path, connector: str, *, insecure_tcp: bool = False) -> Path:
    """Writes a pipeline whose stages have private arenas, as if each were on another host."""
    path = relays(folder, connector=connector)
    added = "data_plane: {shared_arena: false}" + (", insecure_tcp: true" if insecure_tcp else "")
    path.write_text(path.read_text().replace("{engine: fake,", f"{{engine: fake, {added},"))
    return path


def _links(up: Deployment, tls: Path) -> Sequence[Any]:
    command = [STAGEMESH, "stages", "--server", up.endpoint, "--tls", str(tls / "client"), "--json"]
    document = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    return [link for edge in document["edges"] for link in edge["links"]]


def _unknown_ports(up: Deployment) -> set[tuple[str, int]]:
    """Returns the addresses on which a process listens although the deployment does not name them."""
    named = {up.endpoint, up.admin_endpoint, *(str(each["endpoint"]) for each in up.statuses.values())}
    found = listening(*family(up.process.pid))
    return {(host, port) for host, port in found if f"{host}:{port}" not in named}


@pytest.fixture
def tls(tmp_path: Path) -> Path:
    return tmp_path / "authority"


def test_edges_use_grpc_and_no_further_port(tmp_path: Path, tls: Path) -> None:
    with deployed(_pipeline(tmp_path, "auto"), "--tls", str(tls)) as up:
        links = _links(up, tls)
        assert {link["connector"] for link in links} == {"CONNECTOR_GRPC"}
        refusals = [each["error"]["message"] for link in links for each in link["refusals"]]
        assert any("no RDMA device" in each and "insecure_tcp: true" in each for each in refusals)
        assert _unknown_ports(up) == set()


def test_an_edge_that_demands_nixl_does_not_start(tmp_path: Path, tls: Path) -> None:
    command = [STAGEMESH, "up", str(_pipeline(tmp_path, "nixl")), "--port", "0", "--tls", str(tls)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode != 0
    assert "insecure_tcp: true" in ran.stderr


def test_an_operator_permits_tcp_by_name_on_the_interface_of_the_replica(tmp_path: Path, tls: Path) -> None:
    with deployed(_pipeline(tmp_path, "nixl", insecure_tcp=True), "--tls", str(tls)) as up:
        assert {link["connector"] for link in _links(up, tls)} == {"CONNECTOR_NIXL"}
        ports = _unknown_ports(up)
        assert {host for host, _ in ports} == {"127.0.0.1"}
