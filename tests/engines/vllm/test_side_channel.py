"""The port that a replica reserves for vLLM's KV connector."""

import socket

import pytest

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.vllm.kv_handover.feature import SideChannel


def test_reserved_port_is_taken_until_vllm_listens_there() -> None:
    channel = SideChannel("127.0.0.1:50051")
    address = (channel.host, channel.reserve())
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(address)
    with socket.socket() as listener:
        # As zmq listens.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen()
        channel.close()
        with socket.create_connection(address, timeout=5):
            pass


def test_two_replicas_of_a_host_get_different_ports() -> None:
    channels = [SideChannel("127.0.0.1:0") for _ in range(8)]
    assert len({channel.reserve() for channel in channels}) == len(channels)
    for channel in channels:
        channel.close()


def test_port_is_in_the_range_of_ucx(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        last = taken.getsockname()[1]
        monkeypatch.setenv("UCX_TCP_PORT_RANGE", f"{last - 20}-{last}")
        channel = SideChannel("127.0.0.1:0")
        assert last - 20 <= channel.reserve() < last
        channel.close()


def test_full_range_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        monkeypatch.setenv("UCX_TCP_PORT_RANGE", f"{port}-{port}")
        with pytest.raises(NotReadyError, match=r"no port of 127\.0\.0\.1 is free"):
            SideChannel("127.0.0.1:0").reserve()


@pytest.mark.parametrize(
    ("address", "host"),
    [("10.0.0.7:50051", "10.0.0.7"), ("[::1]:50051", "::1"), ("0.0.0.0:50051", socket.gethostname())],
)
def test_host_is_the_one_that_peers_reach(address: str, host: str) -> None:
    assert SideChannel(address).host == host
