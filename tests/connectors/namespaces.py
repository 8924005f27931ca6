"""Simulates hosts by network namespaces on a bridge, each with its own processes, mounts and /dev/shm.

A test can unplug them. Needs root and a kernel that permits it. The namespaces end with the processes that hold them.
"""

import functools
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psutil
import pytest

ENVIRONMENT = {"UCX_TLS": "tcp"}
"""Restricts UCX to tcp, because it could cross namespaces through the shared kernel."""

_HOLD = "mount -t tmpfs tmpfs /dev/shm && ip link set lo up && echo ready && exec sleep infinity"
_UNSHARE = ["unshare", "--net", "--pid", "--mount", "--fork", "--kill-child", "--mount-proc"]


class Namespaces:
    """Three hosts "10.77.0.1" to "10.77.0.3" and the bridge between them."""

    def __init__(self, switch: "subprocess.Popen[str]", hosts: "list[subprocess.Popen[str]]") -> None:
        self._switch = _init_of(switch)
        self._hosts = [_init_of(host) for host in hosts]
        self._run(self._switch, "ip link add hub type bridge && ip link set hub up")
        for number, pid in enumerate(self._hosts):
            self._plug_in(number, pid)

    def within(self, number: int) -> list[str]:
        """Returns the command that runs another command on a host."""
        return ["nsenter", "--target", str(self._hosts[number]), "--net", "--pid", "--mount", "--"]

    def address(self, number: int) -> str:
        """Returns a host's address."""
        return f"10.77.0.{number + 1}"

    def cut(self, number: int) -> None:
        """Unplugs a host, so that its packets are lost silently."""
        self._run(self._switch, f"ip link set port{number} down")

    def heal(self, number: int) -> None:
        """Plugs a host in again."""
        self._run(self._switch, f"ip link set port{number} up")

    def _plug_in(self, number: int, pid: int) -> None:
        self._run(
            self._switch,
            f"ip link add port{number} type veth peer name eth0 netns {pid} && "
            f"ip link set port{number} master hub && ip link set port{number} up",
        )
        self._run(pid, f"ip address add {self.address(number)}/24 dev eth0 && ip link set eth0 up")

    @staticmethod
    def _run(pid: int, script: str) -> None:
        enter = ["nsenter", "--target", str(pid), "--net", "--"]
        subprocess.run([*enter, "sh", "-ec", script], check=True, timeout=10)


@contextmanager
def namespaces() -> Iterator[Namespaces]:
    """Yields three hosts on a bridge, or skips the test if that is not permitted."""
    if reason := _forbidden():
        pytest.skip(reason)
    with ExitStack() as stack:
        switch, *hosts = [stack.enter_context(_held()) for _ in range(4)]
        yield Namespaces(switch, hosts)


@functools.cache
def _forbidden() -> str:
    """Returns why namespaces cannot be created here, or "" if they can."""
    script = "mount -t tmpfs tmpfs /dev/shm && ip link add hub type bridge && ip link add one type veth peer name two"
    try:
        done = subprocess.run([*_UNSHARE, "sh", "-ec", script], capture_output=True, text=True, timeout=10, check=False)
    except OSError as exc:
        return f"no namespaces here: {exc}"
    return "" if done.returncode == 0 else f"no network namespaces here: {done.stderr.strip()}"


@contextmanager
def _held() -> "Iterator[subprocess.Popen[str]]":
    """Runs a process in new namespaces, which end with it."""
    with subprocess.Popen([*_UNSHARE, "sh", "-ec", _HOLD], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "the namespace was not set up"
            yield process
        finally:
            # Its child is the first process of the namespace. All others end with it.
            process.kill()


def _init_of(process: "subprocess.Popen[str]") -> int:
    """Returns the id of the first process in the namespaces, as seen from outside."""
    return psutil.Process(process.pid).children()[0].pid
