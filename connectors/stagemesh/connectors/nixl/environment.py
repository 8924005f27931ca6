"""What the nixl library takes from the process environment, and what of this host it will use."""

import os
from pathlib import Path

from stagemesh.common.errors import NotReadyError

_RDMA_DEVICES = Path("/sys/class/infiniband")
_SEGMENT_BYTES = "256k"
"""UCX moves 8 KiB at a time over tcp, a third slower than a plain socket; with this it is on a par."""
_SEGMENTS = ("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE")


def quiet() -> None:
    """Keeps the libraries' logs off this process's output: what they say comes as errors. Call it before loading."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "FATAL")
    os.environ.setdefault("UCX_LOG_LEVEL", "fatal")


def backend_options() -> dict[str, str]:
    """Settings of UCX that differ from its defaults. What the user set goes before them."""
    return {"engine_config": ",".join(f"{name}={_SEGMENT_BYTES}" for name in _SEGMENTS)}


def shared_settings() -> str:
    """What must be the same on both sides: where it is not, the side that gets the larger segments crashes."""
    return ",".join(f"UCX_{name}={os.environ.get(f'UCX_{name}', _SEGMENT_BYTES)}" for name in _SEGMENTS)


def describe() -> str:
    """What carries reads between hosts, for people: RDMA devices, tcp where there are none, or the user's choice."""
    chosen = os.environ.get("UCX_TLS", "")
    if chosen and chosen != "all":
        return f"{chosen} (UCX_TLS)"
    devices = sorted(path.name for path in _RDMA_DEVICES.glob("*"))
    return f"rdma ({', '.join(devices)})" if devices else "tcp (no RDMA device)"


def unavailable(message: str) -> NotReadyError:
    """The connector cannot be used, here or between these two."""
    return NotReadyError(message, reason="CONNECTOR_UNAVAILABLE")
