"""The transports of nixl: none with ports if there are certificates, and else the process's own interface."""

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import psutil
import pytest

from stagemesh.common.errors import NotReadyError
from stagemesh.common.plugins.connectors import NIXL
from stagemesh.conformance.replicas import End
from stagemesh.connectors.nixl import environment
from tests.connectors.nixl_process import nixl_process
from tests.connectors.replicas import Replica
from tests.credentials import issue, process_credentials
from tests.ports import listening_hosts
from tests.rpc.call_errors import raises

LOOPBACK = "127.0.0.1"


@pytest.fixture
def certificates(tmp_path: Path) -> Iterator[None]:
    """Makes this process use certificates."""
    with process_credentials(issue(tmp_path, "stage/a/a-0")):
        yield


@pytest.fixture
def devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the host's RDMA devices, which has none."""
    folder = tmp_path / "infiniband"
    folder.mkdir()
    monkeypatch.setattr(environment, "_RDMA_DEVICES", folder)
    return folder


async def _offer() -> bytes:
    end = End(NIXL, replica="a-0")
    try:
        return await end.connector.offer()
    finally:
        await end.close()


@asynccontextmanager
async def _pair(listen: str) -> AsyncIterator[list[Replica]]:
    """Runs a producer, and a consumer that has read from it over TCP."""
    async with AsyncExitStack() as stack:
        started = [nixl_process(name, environment={"UCX_TLS": "tcp,self"}, listen=listen) for name in ("a-0", "b-0")]
        producer, consumer = [await stack.enter_async_context(each) for each in started]
        await consumer.call("connect", offer=await producer.call("offer"), replica="a-0")
        places = await producer.call("write", sizes=[1 << 20], seed=1)
        assert await consumer.call("fetch", replica="a-0", places=places, seed=1)
        yield [producer, consumer]


@pytest.mark.usefixtures("certificates", "devices")
@pytest.mark.parametrize(
    "chosen",
    ["tcp", "all", "rc,tcp", "tcp,self", "^tcp", "^rc", "^", "sm,,tcp", "rc, tcp", "TCP", "\\tcp", "tcp:aux", "rc\n"],
)
async def test_with_certificates_transports_have_no_ports(chosen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", chosen)
    with raises(NotReadyError, reason="CONNECTOR_UNAVAILABLE", match="(?s)UCX_TLS is .* `insecure_tcp"):
        await _offer()


@pytest.mark.usefixtures("certificates", "devices")
@pytest.mark.parametrize("chosen", ["", None])
async def test_with_certificates_nixl_needs_a_device(chosen: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("UCX_TLS", raising=False)
    if chosen is not None:
        monkeypatch.setenv("UCX_TLS", chosen)
    with raises(NotReadyError, reason="CONNECTOR_UNAVAILABLE", match="no RDMA device.* `insecure_tcp"):
        await _offer()


@pytest.mark.usefixtures("certificates")
async def test_an_ucx_without_transports_is_named(devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (devices / "mlx9_0").mkdir()
    monkeypatch.setenv("UCX_TLS", "")
    with raises(NotReadyError, reason="CONNECTOR_UNAVAILABLE", match="cannot start here with rc,dc,ud,self"):
        await _offer()


def _external() -> str:
    """Returns an address of this host that other hosts may reach."""
    for addresses in psutil.net_if_addrs().values():
        for each in addresses:
            if each.family == socket.AF_INET and not each.address.startswith("127."):
                return each.address
    pytest.skip("this host has no network")


@pytest.mark.parametrize("is_external", [False, True])
async def test_without_certificates_ports_are_on_the_interface_of_listen(*, is_external: bool) -> None:
    host = _external() if is_external else LOOPBACK
    async with _pair(f"{host}:0") as replicas:
        assert listening_hosts(*(psutil.Process(each.process_id) for each in replicas)) == {host}


@pytest.mark.parametrize("host", ["localhost", "[::1]", "127.3.2.1", "[::]", "", "192.0.2.9"])
def test_a_loopback_address_excludes_others(host: str, devices: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (devices / "mlx9_0" / "ports" / "1").mkdir(parents=True)
    monkeypatch.setattr(environment, "set_library_variables", (found := dict[str, str]()).update)
    environment.bind_to(f"{host}:0")
    is_loopback = host in {"localhost", "[::1]", "127.3.2.1"}
    assert found == ({"UCX_NET_DEVICES": "lo,mlx9_0:1"} if is_loopback else {})
