"""The environment variables of the nixl and UCX libraries, which decide on which network devices UCX listens.

UCX neither encrypts TCP nor authenticates its peers, which can read and write the memory of the process. A process with
certificates therefore has only transports without ports, unless the operator permits others.
"""

import fcntl
import importlib
import importlib.util
import ipaddress
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from stagemesh.common.process.settings import library_variable, set_library_variables
from stagemesh.connectors.base import unavailable

_NIXL = "nixl"
_LIBRARIES = ("nixl_cu13", "nixl_cu12")


def provide_nixl() -> None:
    """Imports the package `nixl`, or gives the installed library its name. Raises ImportError if there is no library.

    The package raises ImportError if the library for the CUDA version of torch is missing. The other library then
    transfers host memory, but no memory of a GPU.
    """
    if _NIXL in sys.modules:
        return
    try:
        importlib.import_module(_NIXL)
    except ImportError:
        library = next((each for each in _LIBRARIES if importlib.util.find_spec(each) is not None), _LIBRARIES[-1])
        for name in ("._bindings", "._api", ""):
            sys.modules[_NIXL + name] = importlib.import_module(library + name)


_RDMA_DEVICES = Path("/sys/class/infiniband")
_DEVICES, _TRANSPORTS = "UCX_NET_DEVICES", "UCX_TLS"
_RDMA = "rc,dc,ud,self,cuda_copy,cuda_ipc"
"""UCX's transports of a process with certificates: RDMA, and copies to and from the memory of GPUs on this host."""
_WITHOUT_PORTS = re.compile(
    r"ib|srd|(rc|dc|ud)(_v|_x|_verbs|_mlx5)?|self|mm|sm|shm|posix|sysv|cma|xpmem|(cuda|rocm)(_copy|_ipc)?|gdr_copy"
)
"""The transports that a user may select in a process with certificates. They use RDMA, or do not leave the host."""
_OPT_IN = "set `insecure_tcp: true` at the stages of both ends if their network is closed by other means"
_SIOCGIFADDR = 0x8915
_SEGMENT_BYTES = "256k"
"""The size of UCX's TCP segments. With UCX's default of 8 KiB, UCX is a third slower than a plain TCP socket."""
_SEGMENTS = ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE")
_SETTINGS = {
    **dict.fromkeys(_SEGMENTS, _SEGMENT_BYTES),
    # UCX connects while the thread continues. Otherwise, the thread would wait for minutes for a host that has
    # vanished, and reads from other hosts would wait, too.
    "UCX_TCP_CONN_NB": "y",
    # The libraries' errors are raised as exceptions.
    "NIXL_LOG_LEVEL": "FATAL",
    "UCX_LOG_LEVEL": "fatal",
}


def prepare(*, permits_tcp: bool) -> None:
    """Sets the environment variables of nixl and UCX that the user has not set. Call it before nixl creates an agent.

    Restricts UCX to transports without ports if `permits_tcp` is False. Raises NotReadyError (CONNECTOR_UNAVAILABLE) if
    UCX_TLS then selects other transports, or if it is not set and this host has no RDMA device.
    """
    set_library_variables(_SETTINGS)
    if permits_tcp:
        return
    chosen = library_variable(_TRANSPORTS) or _RDMA
    # Also refuses `all` and lists that begin with ^, which select transports that they do not name.
    if others := [name for name in chosen.split(",") if not _WITHOUT_PORTS.fullmatch(name)]:
        raise unavailable(
            f"UCX_TLS is {chosen!r}, but with certificates UCX may not use {', '.join(others)}, because it neither "
            f"encrypts TCP nor authenticates peers; remove UCX_TLS, or {_OPT_IN}"
        )
    if chosen == _RDMA and not any(_RDMA_DEVICES.glob("*")):
        raise unavailable(
            "this host has no RDMA device, and with certificates UCX may not use TCP, because it neither encrypts TCP "
            f"nor authenticates peers; give the process a device, or {_OPT_IN}"
        )
    set_library_variables({_TRANSPORTS: chosen}, replace=True)


def bind_to(listen: str) -> None:
    """Confines UCX's TCP to the network interface of `listen`, the address "host:port" of this process.

    RDMA devices remain usable. Does nothing if UCX_NET_DEVICES is set, or if no interface has the address, as with
    0.0.0.0. Call this function before nixl is loaded.
    """
    with suppress(OSError):
        host = str(socket.getaddrinfo(listen.rpartition(":")[0].strip("[]"), None)[0][4][0])
        is_loopback = ipaddress.ip_address(host).is_loopback
        names = ["lo"] if is_loopback else [name for name, address in _interfaces() if address == host]
        if names:
            rdma = sorted(f"{port.parts[-3]}:{port.name}" for port in _RDMA_DEVICES.glob("*/ports/*"))
            set_library_variables({_DEVICES: ",".join((names[0], *rdma))})


def _interfaces() -> Iterator[tuple[str, str]]:
    """Yields the name and the addresses of each network interface: the first one of IPv4, and all of IPv6."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with suppress(OSError):
                request = fcntl.ioctl(probe, _SIOCGIFADDR, name.encode().ljust(40, b"\0"))
                yield name, socket.inet_ntoa(request[20:24])
    with suppress(OSError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            address, *_, name = line.split()
            yield name, socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))


def shared_settings() -> str:
    """Returns the UCX settings that must be equal at the producer and the consumer, as "NAME=value,NAME=value".

    A replica crashes if it receives larger segments than its own settings specify.
    """
    return ",".join(f"{name}={library_variable(name, _SEGMENT_BYTES)}" for name in _SEGMENTS)


def describe() -> str:
    """Returns a description of the transport between hosts.

    The description is the value of UCX_TLS if the variable is set, or else the RDMA devices, or else TCP.
    """
    chosen = library_variable(_TRANSPORTS)
    if chosen and chosen != "all":
        return f"{chosen} (UCX_TLS)"
    devices = sorted(path.name for path in _RDMA_DEVICES.glob("*"))
    return f"rdma ({', '.join(devices)})" if devices else "tcp (no RDMA device)"
