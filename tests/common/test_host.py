import ctypes
import os
import platform
import struct
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from stagemesh.common.process.host import available_bytes, lower_thread_priority, shorten_time_slices

MIB = 1 << 20


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A host with 1000 MiB of available memory."""
    write(tmp_path / "proc/meminfo", f"MemTotal: {2000 * 1024} kB\nMemAvailable: {1000 * 1024} kB\n")
    return tmp_path


def add_v2_group(folder: Path, *, limit: str) -> None:
    write(folder / "memory.max", f"{limit}\n")
    write(folder / "memory.current", f"{30 * MIB}\n")
    write(folder / "memory.stat", f"anon 1\ninactive_file {10 * MIB}\n")


def add_v1_group(folder: Path, *, limit: int) -> None:
    write(folder / "memory.limit_in_bytes", f"{limit}\n")
    write(folder / "memory.usage_in_bytes", f"{30 * MIB}\n")
    write(folder / "memory.stat", f"total_inactive_file {10 * MIB}\n")


def test_a_host_without_groups_gives_its_available_memory(root: Path) -> None:
    assert available_bytes(root) == 1000 * MIB


@pytest.mark.parametrize(
    ("cgroup", "groups", "available_mib"),
    [
        ("0::/", {"": 100}, 80),
        ("0::/outer/inner", {"outer": 100, "outer/inner": None}, 80),
        ("0::/", {"": 5000}, 1000),
        ("0::/", {"": 5}, 0),
    ],
    ids=["container", "parent group", "above the available memory", "exceeded"],
)
def test_the_limits_of_groups_count(root: Path, cgroup: str, groups: dict[str, int | None], available_mib: int) -> None:
    write(root / "proc/self/cgroup", f"{cgroup}\n")
    for name, limit_mib in groups.items():
        add_v2_group(root / "sys/fs/cgroup" / name, limit="max" if limit_mib is None else str(limit_mib * MIB))
    assert available_bytes(root) == available_mib * MIB


@pytest.mark.parametrize(
    ("cgroup", "group"),
    [
        ("5:cpu,cpuacct:/box\n4:memory:/box\n1:name=systemd:/box\n", "memory/box"),
        # A path of the host is not visible in the container. The limit is at the mount.
        ("4:memory:/docker/0123\n", "memory"),
    ],
)
def test_the_limit_of_a_version_1_group_counts(root: Path, cgroup: str, group: str) -> None:
    write(root / "proc/self/cgroup", cgroup)
    add_v1_group(root / "sys/fs/cgroup" / group, limit=100 * MIB)
    assert available_bytes(root) == 80 * MIB


def test_a_system_without_this_information_gives_none(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None


def test_this_host_has_memory() -> None:
    assert (available_bytes() or 0) > 0


def _time_slice_ns() -> int:
    """Returns the time slice that the calling thread has requested, as sched_getattr(2) reports it."""
    number, attributes = {"x86_64": 315, "aarch64": 275}[platform.machine()], ctypes.create_string_buffer(48)
    assert ctypes.CDLL(None).syscall(number, 0, attributes, 48, 0) == 0
    runtime_ns: int = struct.unpack("=IIQiIQQQ", attributes.raw)[5]
    return runtime_ns


@pytest.mark.skipif(
    tuple(int(part) for part in platform.release().split(".")[:2]) < (6, 12), reason="needs Linux 6.12 or later"
)
def test_only_the_calling_thread_has_short_time_slices() -> None:
    slices_ns: list[int] = []
    niceness: list[int] = []

    def shorten() -> None:
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), os.getpriority(os.PRIO_PROCESS, 0) + 1)
        slices_ns.append(_time_slice_ns())
        shorten_time_slices()
        slices_ns.append(_time_slice_ns())
        niceness.append(os.getpriority(os.PRIO_PROCESS, 0))
        child = threading.Thread(target=lambda: slices_ns.append(_time_slice_ns()))
        child.start()
        child.join()

    thread = threading.Thread(target=shorten)
    thread.start()
    thread.join()
    assert niceness == [os.getpriority(os.PRIO_PROCESS, 0) + 1]
    default_ns, short_ns, childs_ns = slices_ns
    assert (short_ns, childs_ns) == (100_000, default_ns)
    assert short_ns < default_ns


def test_a_copying_thread_has_a_lower_priority_than_its_process() -> None:
    with ThreadPoolExecutor(1, initializer=lower_thread_priority) as pool:
        assert pool.submit(os.getpriority, os.PRIO_PROCESS, 0).result() > os.getpriority(os.PRIO_PROCESS, 0)


_FREE_AND_ALLOCATE = """
import resource
import threading
from stagemesh.common.process.host import retain_freed_memory, retain_tensor_memory, share_heap_among_threads
{calls}
def work():
    for _ in range(20):
        blocks = [b"x" * ({size_mb} << 20) for _ in range(8)]
        del blocks
thread = threading.Thread(target=work)
thread.start()
thread.join()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc can retain freed memory")
@pytest.mark.parametrize(
    ("size_mb", "calls"), [(1, "retain_freed_memory()"), (16, "share_heap_among_threads(); retain_tensor_memory()")]
)
def test_a_thread_reuses_freed_memory_without_page_faults(size_mb: int, calls: str) -> None:
    faults = [
        int(subprocess.check_output([sys.executable, "-c", _FREE_AND_ALLOCATE.format(size_mb=size_mb, calls=wanted)]))
        for wanted in ("", calls)
    ]
    pages = 20 * 8 * (size_mb << 20) // os.sysconf("SC_PAGE_SIZE")
    assert faults[0] - faults[1] > pages // 2
