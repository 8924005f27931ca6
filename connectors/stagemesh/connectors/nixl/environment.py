"""The environment variables of the nixl and UCX libraries, and a description of the host's RDMA devices."""

import importlib
import importlib.util
import sys
from pathlib import Path

from stagemesh.common.process.settings import library_variable, set_library_variables

_NIXL = "nixl"
_LIBRARIES = ("nixl_cu13", "nixl_cu12")
_SUBMODULES = ("_bindings", "_api")


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
        library = _find_library()
        for name in _SUBMODULES:
            sys.modules[f"{_NIXL}.{name}"] = importlib.import_module(f"{library}.{name}")
        sys.modules[_NIXL] = importlib.import_module(library)


def _find_library() -> str:
    for name in _LIBRARIES:
        if importlib.util.find_spec(name) is not None:
            return name
    raise ModuleNotFoundError(f"No module named {_LIBRARIES[-1]!r}", name=_LIBRARIES[-1])


_RDMA_DEVICES = Path("/sys/class/infiniband")
_SEGMENT_BYTES = "256k"
"""The size of UCX's TCP segments. With UCX's default of 8 KiB, UCX is a third slower than a plain TCP socket."""
_SEGMENTS = ("TCP_TX_SEG_SIZE", "TCP_RX_SEG_SIZE")
_SETTINGS = {**dict.fromkeys(_SEGMENTS, _SEGMENT_BYTES), "TCP_CONN_NB": "y"}
"""The UCX settings that differ from the defaults. With `TCP_CONN_NB`, UCX connects while the thread continues.

Otherwise, the thread would wait for minutes for a host that has vanished, and reads from other hosts would wait, too.
"""


def quiet() -> None:
    """Silences the logs of nixl and UCX. Call this function before nixl is loaded.

    The logs are not needed, because the libraries' errors are raised as exceptions.
    """
    set_library_variables({"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"})


def backend_options() -> dict[str, str]:
    """Returns the options of nixl's UCX backend that differ from the defaults.

    Environment variables that the user has set take precedence over these options.
    """
    return {"engine_config": ",".join(f"{name}={value}" for name, value in _SETTINGS.items())}


def set_variables() -> None:
    """Sets the options as environment variables, for a library that creates agents of its own, such as vLLM.

    Call this function before nixl is loaded. Variables that are already set do not change.
    """
    quiet()
    set_library_variables({f"UCX_{name}": value for name, value in _SETTINGS.items()})


def shared_settings() -> str:
    """Returns the UCX settings that must be equal at the producer and the consumer, as "NAME=value,NAME=value".

    A replica crashes if it receives larger segments than its own settings specify.
    """
    return ",".join(f"UCX_{name}={library_variable(f'UCX_{name}', _SEGMENT_BYTES)}" for name in _SEGMENTS)


def describe() -> str:
    """Returns a description of the transport between hosts.

    The description is the value of UCX_TLS if the variable is set, or else the RDMA devices, or else TCP.
    """
    chosen = library_variable("UCX_TLS")
    if chosen and chosen != "all":
        return f"{chosen} (UCX_TLS)"
    devices = sorted(path.name for path in _RDMA_DEVICES.glob("*"))
    return f"rdma ({', '.join(devices)})" if devices else "tcp (no RDMA device)"
