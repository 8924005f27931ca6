"""Hosts on one machine: each has its own network, mounts, host name and processes.

A bridge in a network namespace of its own connects the hosts. The first process of a host's process namespace waits;
when it is killed, the kernel kills all processes of the host, and their mounts and network interfaces disappear.
"""

import os
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from k8s.cluster.shell import run, wait_until

_SWITCH = "stagemesh-switch"
_BRIDGE = "switch"
_NETWORK = "10.231.7"
# Folders of which each host has its own.
_OWN_FOLDERS = (
    "/etc/cni/net.d",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/log/containers",
    "/var/log/pods",
)


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host. `number` is the last part of its address; `folder` contains its files, its logs and its process id."""

    name: str
    number: int
    folder: Path

    @property
    def address(self) -> str:
        return f"{_NETWORK}.{self.number}"

    @property
    def pod_network(self) -> str:
        """The addresses of pods on this host."""
        return f"10.244.{self.number}.0/24"

    @property
    def namespace(self) -> str:
        return f"stagemesh-{self.name}"

    def up(self, *, init: Path) -> None:
        """Creates the host. `init` is the program of its first process."""
        port = f"port-{self.number}"
        run("ip", "netns", "add", self.namespace)
        run(
            "ip", "link", "add", "eth0", "netns", self.namespace, "type", "veth", "peer", "name", port, "netns", _SWITCH
        )
        run("ip", "-n", _SWITCH, "link", "set", port, "master", _BRIDGE, "up")
        run("ip", "-n", self.namespace, "address", "add", f"{self.address}/24", "dev", "eth0")
        run("ip", "-n", self.namespace, "link", "set", "eth0", "up")
        run("ip", "-n", self.namespace, "link", "set", "lo", "up")
        mounts = ["mount -t tmpfs tmpfs /run"]
        for target in _OWN_FOLDERS:
            source = self.folder / "root" / target.strip("/")
            source.mkdir(parents=True, exist_ok=True)
            Path(target).mkdir(parents=True, exist_ok=True)
            mounts.append(f"mount --bind {source} {target}")
        script = " && ".join(
            [*mounts, f"hostname {self.name}", "echo 1 >/proc/sys/net/ipv4/ip_forward", f"exec {init}"]
        )
        command = ["nsenter", f"--net=/run/netns/{self.namespace}", "unshare", "--mount", "--uts", "--pid", "--fork"]
        command += ["--kill-child", "--mount-proc", "--propagation=private", "sh", "-c", script]
        self._pid_file.write_text(str(_start(command, log=self.folder / "init.log")))
        wait_until(lambda: Path(f"/proc/{self._first_process()}/comm").read_text().strip() == init.name, 10, "a host")

    def start(self, name: str, *command: str) -> None:
        """Starts a program on this host. Its output goes to `NAME.log` in the host's folder."""
        _start([*self._enter(), *command], log=self.folder / f"{name}.log")

    def run(self, *command: str, stdin: str | None = None) -> str:
        """Runs a program on this host to its end, and returns its output."""
        return run(*self._enter(), *command, stdin=stdin)

    def run_outside(self, *command: str) -> str:
        """Runs a program in the host's network, but with the machine's own files and processes."""
        return run(*self._outside(command))

    def start_outside(self, name: str, *command: str) -> subprocess.Popen[bytes]:
        """Starts a program in the host's network, but with the machine's own files and processes."""
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(self._outside(command), stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def cut(self, *, connected: bool) -> None:
        """Disconnects the host from all others, or connects it again."""
        run("ip", "-n", _SWITCH, "link", "set", f"port-{self.number}", "up" if connected else "down")

    def down(self) -> None:
        """Kills all processes of the host and removes its network. Does nothing if the host does not exist."""
        if self._pid_file.exists():
            pid = int(self._pid_file.read_text())
            if Path(f"/proc/{pid}/task").exists():
                os.kill(self._first_process(), signal.SIGKILL)
                wait_until(lambda: not Path(f"/proc/{pid}/task").exists() or _is_zombie(pid), 30, "the end of a host")
            self._pid_file.unlink()
        if (Path("/run/netns") / self.namespace).exists():
            run("ip", "netns", "delete", self.namespace)

    def _outside(self, command: Sequence[str]) -> Sequence[str]:
        return ("nsenter", f"--net=/run/netns/{self.namespace}", *command)

    @property
    def _pid_file(self) -> Path:
        return self.folder / "pid"

    def _enter(self) -> Sequence[str]:
        return ("nsenter", f"--target={self._first_process()}", "--net", "--mount", "--uts", "--pid", "--")

    def _first_process(self) -> int:
        """Returns the process id, seen from outside, of the host's first process: the child of `unshare`."""
        pid = int(self._pid_file.read_text())
        return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def connect(hosts: Sequence[Host], *, init: Path) -> None:
    """Creates the switch and all hosts, and routes the pods' networks between the hosts."""
    run("ip", "netns", "add", _SWITCH)
    run("ip", "-n", _SWITCH, "link", "add", _BRIDGE, "type", "bridge")
    run("ip", "-n", _SWITCH, "link", "set", _BRIDGE, "up")
    for host in hosts:
        host.up(init=init)
    for host in hosts:
        for other in hosts:
            if other is not host:
                run("ip", "-n", host.namespace, "route", "add", other.pod_network, "via", other.address)


def disconnect(hosts: Sequence[Host]) -> None:
    """Removes all hosts and the switch."""
    for host in hosts:
        host.down()
    if (Path("/run/netns") / _SWITCH).exists():
        run("ip", "netns", "delete", _SWITCH)


def _start(command: Sequence[str], *, log: Path) -> int:
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    return process.pid


def _is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
