"""The environment variables of the nixl and UCX libraries, and the RDMA devices of this host that they use."""

from pathlib import Path

from stagemesh.common.errors import NotReadyError
from stagemesh.common.settings import library_variable, set_library_variables

_RDMA_DEVICES = Path("/sys/class/infiniband")
_SEGMENT_BYTES = "256k"
"""The size of UCX's TCP segments. With UCX's default of 8 KiB, UCX is a third slower than a plain socket."""
_SEGMENTS = ("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE")


def quiet() -> None:
    """Silences the logs of nixl and UCX, because errors are raised as exceptions. Call it before loading nixl."""
    set_library_variables({"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"})


def backend_options() -> dict[str, str]:
    """Returns the options of nixl's UCX backend that differ from the defaults. The user's variables take precedence."""
    return {"engine_config": ",".join(f"{name}={_SEGMENT_BYTES}" for name in _SEGMENTS)}


def shared_settings() -> str:
    """Returns the settings that must be equal at the producer and the consumer.

    A replica crashes if it receives larger segments than its own settings specify.
    """
    return ",".join(f"UCX_{name}={library_variable(f'UCX_{name}', _SEGMENT_BYTES)}" for name in _SEGMENTS)


def describe() -> str:
    """Returns a description of the transport between hosts: the value of UCX_TLS, the RDMA devices, or TCP."""
    chosen = library_variable("UCX_TLS")
    if chosen and chosen != "all":
        return f"{chosen} (UCX_TLS)"
    devices = sorted(path.name for path in _RDMA_DEVICES.glob("*"))
    return f"rdma ({', '.join(devices)})" if devices else "tcp (no RDMA device)"


def unavailable(message: str) -> NotReadyError:
    """Returns the error for a connector that cannot be used on this host or between these two replicas."""
    return NotReadyError(message, reason="CONNECTOR_UNAVAILABLE")
