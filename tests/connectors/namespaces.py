"""Simulates hosts by network namespaces on a bridge, each with its own processes, mounts and /dev/shm.

A test can unplug them. Needs root and a kernel that permits it. The namespaces end with the processes that hold them.
"""

import functools
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Self

import psutil
import pytest

ENVIRONMENT = {"UCX_TLS": "tcp"}
"""Restricts UCX to tcp, because it could cross namespaces through the shared kernel."""

_HOLD = "mount -t tmpfs -o mode=1777 tmpfs /dev/shm && ip link set lo up && echo ready && exec sleep infinity"
_UNSHARE = ["setpriv", "--pdeathsig", "KILL", "unshare", "--net", "--uts", "--ipc", "--pid", "--mount", "--fork"]
_UNSHARE += ["--kill-child", "--mount-proc"]


class HeldNamespaces:
    """New namespaces of every kind except users and cgroups.

    A process holds them. They end with `close`, or with the process that created them.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen([*_UNSHARE, "sh", "-ec", _HOLD], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == "ready\n", "the namespaces were not set up"
        # The first process of the PID namespace, as seen from outside.
        self.pid = psutil.Process(self._process.pid).children()[0].pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enter(self, *kinds: str) -> list[str]:
        """Returns the command that runs another command in these namespaces of the given kinds."""
        return ["nsenter", "--target", str(self.pid), *[f"--{kind}" for kind in kinds], "--"]

    def run(self, script: str, *kinds: str) -> None:
        """Runs a shell script in the network namespace and in those of the given kinds."""
        subprocess.run([*self.enter("net", *kinds), "sh", "-ec", script], check=True, timeout=10)

    def close(self) -> None:
        """Ends the first process of the PID namespace, and all others with it. Closing twice is harmless."""
        # The kernel removes network interfaces only after the process has been reaped.
        self._process.kill()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


class Namespaces:
    """Three hosts "10.77.0.1" to "10.77.0.3" and the bridge between them."""

    def __init__(self, switch: HeldNamespaces, hosts: list[HeldNamespaces]) -> None:
        self._switch, self._hosts = switch, hosts
        self._switch.run("ip link add hub type bridge && ip link set hub up")
        for number, host in enumerate(hosts):
            plug_in(switch, host, port=f"port{number}", bridge="hub", address=f"{self.address(number)}/24")

    def within(self, number: int) -> list[str]:
        """Returns the command that runs another command on a host."""
        return self._hosts[number].enter("net", "pid", "mount")

    def address(self, number: int) -> str:
        """Returns a host's address."""
        return f"10.77.0.{number + 1}"

    def cut(self, number: int) -> None:
        """Unplugs a host, so that its packets are lost silently."""
        self._switch.run(f"ip link set port{number} down")

    def heal(self, number: int) -> None:
        """Plugs a host in again."""
        self._switch.run(f"ip link set port{number} up")


def plug_in(switch: HeldNamespaces, host: HeldNamespaces, *, port: str, bridge: str, address: str) -> None:
    """Connects a host to a bridge of the switch. `port` is the name of the switch's end of the cable.

    `address` is the host's address with the length of its network's prefix.
    """
    switch.run(
        f"ip link add {port} type veth peer name eth0 netns {host.pid} && "
        f"ip link set {port} master {bridge} && ip link set {port} up"
    )
    host.run(f"ip address add {address} dev eth0 && ip link set eth0 up")


@contextmanager
def namespaces() -> Iterator[Namespaces]:
    """Yields three hosts on a bridge, or skips the test if that is not permitted."""
    skip_if_forbidden()
    with ExitStack() as stack:
        switch, *hosts = [stack.enter_context(HeldNamespaces()) for _ in range(4)]
        yield Namespaces(switch, hosts)


def skip_if_forbidden() -> None:
    """Skips the test if namespaces cannot be created here."""
    if reason := _forbidden():
        pytest.skip(reason)


@functools.cache
def _forbidden() -> str:
    """Returns why namespaces cannot be created here, or "" if they can."""
    script = "mount -t tmpfs tmpfs /dev/shm && ip link add hub type bridge && ip link add one type veth peer name two"
    try:
        done = subprocess.run([*_UNSHARE, "sh", "-ec", script], capture_output=True, text=True, timeout=10, check=False)
    except OSError as exc:
        return f"no namespaces here: {exc}"
    return "" if done.returncode == 0 else f"no network namespaces here: {done.stderr.strip()}"
