"""A fault without effect proves nothing, so each fault is checked to have one."""

import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.soak.connections import sever

_PEER = """
import socket, sys
name, port = sys.argv[1], int(sys.argv[2])
own, mate = socket.socketpair()
local = socket.socket(socket.AF_UNIX)
local.connect(chr(0) + name)
tcp = socket.create_connection(("127.0.0.1", port))
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
input()
mate.send(b"x")
print(own.recv(1), flush=True)
listening.accept()
print("accepted", flush=True)
"""


class _Peer:
    """Starts a process with a local stream and a TCP connection to this one, a socket pair and a listening socket."""

    def __init__(self, process: "subprocess.Popen[str]", local: socket.socket, tcp: socket.socket) -> None:
        self.process, self.local, self.tcp = process, local, tcp
        self.port = int(self.line())

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()


@pytest.fixture
def peer() -> Iterator[_Peer]:
    name = f"stagemesh-soak-{id(object())}"
    with socket.socket(socket.AF_UNIX) as local, socket.create_server(("127.0.0.1", 0)) as tcp:
        local.bind("\0" + name)
        local.listen()
        command = [sys.executable, "-c", _PEER, name, str(tcp.getsockname()[1])]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        with process, local.accept()[0] as ours, tcp.accept()[0] as also_ours:
            ours.settimeout(5)
            also_ours.settimeout(5)
            try:
                yield _Peer(process, ours, also_ours)
            finally:
                process.kill()


def test_severing_ends_local_streams_and_resets_tcp(peer: _Peer) -> None:
    assert sever(peer.process.pid) == 2
    assert peer.local.recv(1) == b""
    with pytest.raises(ConnectionResetError):
        peer.tcp.recv(1)


def test_severing_leaves_other_sockets_open(peer: _Peer) -> None:
    sever(peer.process.pid)
    assert peer.process.stdin is not None
    peer.process.stdin.write("\n")
    peer.process.stdin.flush()
    assert peer.line() == "b'x'"
    with socket.create_connection(("127.0.0.1", peer.port), timeout=5):
        assert peer.line() == "accepted"


def test_severing_a_process_without_connections_is_an_error() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        try:
            assert sever(process.pid) == 0
        finally:
            process.kill()
