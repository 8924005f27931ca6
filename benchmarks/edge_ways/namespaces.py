"""Two network namespaces with a virtual link between them, which stand for two hosts."""

import subprocess
from collections.abc import Generator
from contextlib import ExitStack, contextmanager

from benchmarks.edge_ways.worker import Place, WorkerError

_ADDRESSES = ("10.77.77.1", "10.77.77.2")


@contextmanager
def two_namespaces() -> Generator[tuple[Place, Place]]:
    """Creates two namespaces, which end with the block. Raises WorkerError if that is not permitted."""
    with ExitStack() as stack:
        try:
            first, second = (stack.enter_context(_holder()) for _ in _ADDRESSES)
            _run("ip", "link", "add", "wire", "netns", first, "type", "veth", "peer", "name", "wire", "netns", second)
            places = [_configured(pid, address) for pid, address in zip((first, second), _ADDRESSES, strict=True)]
        except (OSError, subprocess.CalledProcessError) as exc:
            raise WorkerError(f"no network namespaces here: {exc}") from exc
        yield places[0], places[1]


@contextmanager
def _holder() -> Generator[str]:
    """Yields the id of a process in a new namespace. The process ends when its input is closed."""
    # /sys shows the devices of the namespace in which it was mounted, and UCX looks there for devices.
    command = ["unshare", "--net", "--mount", "sh", "-c", "mount -t sysfs sysfs /sys && echo here && exec cat"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None, "asked for"
        if not holder.stdout.readline():
            raise OSError("unshare and mount are refused")
        yield str(holder.pid)


def _configured(pid: str, address: str) -> Place:
    within = ("nsenter", f"--net=/proc/{pid}/ns/net", "ip")
    _run(*within, "address", "add", f"{address}/24", "dev", "wire")
    for device in ("wire", "lo"):
        _run(*within, "link", "set", device, "up")
    return Place(address, int(pid), {"UCX_TLS": "tcp"})


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)
