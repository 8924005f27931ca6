"""The host of this process: its token, its available memory, and the settings of its scheduler and its allocator."""

import ctypes
import hashlib
import os
import platform
import struct
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import inf
from pathlib import Path
from typing import NamedTuple

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_NETWORK = Path("/proc/self/ns/net")
_ROOT = Path("/")
_RECENT_S = 1.0
_BULK_NICENESS = 10
_BULK_THREADS = 2
_SCHED_SETATTR = {"x86_64": 314, "aarch64": 274}
"""The number of the system call sched_setattr, by processor architecture."""
_SCHED_ATTRIBUTES = struct.Struct("=IIQiIQQQ")
"""The C structure sched_attr: size, policy, flags, niceness, real-time priority, runtime, deadline and period."""
_SCHED_FLAG_RESET_ON_FORK = 1
_SHORT_SLICE_NS = 100_000
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_REUSED_BYTES = 4 << 20
"""The size, in bytes, up to which the memory of an object is reused. Must exceed the size of a fragment's message."""
_RETAINED_BYTES = 32 << 20
"""The maximum number of free bytes at the end of the heap that the process retains."""
_REUSED_TENSOR_BYTES, _RETAINED_TENSOR_BYTES = 32 << 20, 256 << 20
"""The same sizes for a process that computes on tensors. The C library accepts no larger size for reused objects."""


@cache
def host_token() -> str:
    """Returns a token that is equal for processes that can connect to each other's local sockets.

    Stages that exchange tensors are placed on replicas with equal tokens if possible. A token is only a hint: when two
    replicas connect, they verify that they can share memory.

    The tokens of two processes are equal if the processes run on the same booted kernel, in the same network namespace
    and as the same user. Returns "" if the system does not provide this information.
    """
    try:
        network = _NETWORK.stat()
        facts = f"{_BOOT_ID.read_text().strip()}/{network.st_dev}/{network.st_ino}/{os.geteuid()}"
    except OSError:
        return ""
    return hashlib.blake2b(facts.encode(), digest_size=8).hexdigest()


class _Files(NamedTuple):
    """The files of one version of control groups.

    `limit` is the name of the file with the memory limit, and `usage` the name of the file with the memory usage.
    `inactive_files` is the key for the size of inactive file pages in the file memory.stat.
    """

    limit: str
    usage: str
    inactive_files: str


_V1 = _Files("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
_V2 = _Files("memory.max", "memory.current", "inactive_file")


def available_bytes(root: Path = _ROOT) -> int | None:
    """Returns the number of bytes of host memory that this process can still allocate, or None if the number is
    unknown.

    The result is the minimum of the host's available memory and the remaining memory of each control group of the
    process and of the group's parents. `root` is the folder that contains `proc` and `sys`.
    """
    free = [_free_on_host(root), *_left_by_groups(root)]
    return min((size_bytes for size_bytes in free if size_bytes is not None), default=None)


class RecentMemory:
    """The result of `available_bytes`, read at most once a second, because a reading takes half a millisecond."""

    def __init__(self) -> None:
        self._read_s, self._size_bytes = -inf, 0

    @property
    def available_bytes(self) -> int:
        """The number of bytes, or 0 if it is unknown."""
        now_s = time.monotonic()
        if now_s >= self._read_s + _RECENT_S:
            self._read_s, self._size_bytes = now_s, available_bytes() or 0
        return self._size_bytes


def _free_on_host(root: Path) -> int | None:
    lines = (line.split() for line in _lines(root / "proc/meminfo"))
    return next((int(words[1]) << 10 for words in lines if words[:1] == ["MemAvailable:"]), None)


def _left_by_groups(root: Path) -> list[int]:
    mount = root / "sys/fs/cgroup"
    left: list[int] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if not controllers:
            left += _left_by_group_and_parents(mount, path, _V2)
        elif "memory" in controllers.split(","):
            left += _left_by_group_and_parents(mount / "memory", path, _V1)
    return left


def _left_by_group_and_parents(mount: Path, path: str, files: _Files) -> list[int]:
    """Returns the number of bytes that remain below the limit of a control group, and of each of its parent groups.

    `mount` is the folder of the root group, and `path` is the group's path in it. Omits groups that have no limit or
    that are not visible in this process's mounts.
    """
    folder = mount / path.lstrip("/")
    left: list[int] = []
    for group in (folder, *folder.parents[: len(folder.parents) - len(mount.parents)]):
        limit, usage = _lines(group / files.limit), _lines(group / files.usage)
        if limit and usage and limit[0].isdigit():
            stat = dict(line.split() for line in _lines(group / "memory.stat"))
            # The kernel reclaims inactive file pages before a limit is exceeded.
            left.append(max(0, int(limit[0]) - int(usage[0]) + int(stat.get(files.inactive_files, "0"))))
    return left


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def shorten_time_slices() -> None:
    """Asks the scheduler to run the calling thread soon after the thread wakes, even if all processors are busy.

    Call it in a thread with an event loop. Child threads and processes are not affected, and the thread's niceness does
    not change. Has no effect on kernels before Linux 6.12, which do not support it, and on threads whose policy is not
    SCHED_OTHER. Source: sched_setattr(2), "sched_runtime".
    """
    number = _SCHED_SETATTR.get(platform.machine()) if sys.platform == "linux" else None
    if number is not None and os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK == os.SCHED_OTHER:
        size, niceness = _SCHED_ATTRIBUTES.size, os.getpriority(os.PRIO_PROCESS, 0)
        fields = (size, os.SCHED_OTHER, _SCHED_FLAG_RESET_ON_FORK, niceness, 0, _SHORT_SLICE_NS, 0, 0)
        _libc().syscall(number, 0, _SCHED_ATTRIBUTES.pack(*fields), 0)


def share_heap_among_threads() -> None:
    """Makes the C library allocate the memory of all threads from one heap.

    Call it before the process starts a thread. By default, the memory of each thread consists of heaps of 64 MiB, and
    a heap is returned to the system when it becomes empty, even if its memory is to be reused. Has no effect on C
    libraries other than glibc. Source: mallopt(3).
    """
    if hasattr(_libc(), "mallopt"):
        _libc().mallopt(_M_ARENA_MAX, 1)


def retain_freed_memory() -> None:
    """Makes the C library reuse the memory of freed messages instead of returning it to the system.

    By default, each large message would use new memory, and the system needs longer to provide the memory than a
    processor needs to copy the message. Has no effect on C libraries other than glibc. Source: mallopt(3).
    """
    _set_retained_memory(_REUSED_BYTES, _RETAINED_BYTES)


def retain_tensor_memory() -> None:
    """Makes the C library reuse the memory of freed tensors, which are larger than messages.

    Call it after `retain_freed_memory`, in a process that computes a model on the CPU. Otherwise the kernel provides
    and clears new memory for each large intermediate result. It still does so for tensors above 32 MiB.
    """
    _set_retained_memory(_REUSED_TENSOR_BYTES, _RETAINED_TENSOR_BYTES)


def _set_retained_memory(reused_bytes: int, retained_bytes: int) -> None:
    if hasattr(_libc(), "mallopt"):
        _libc().mallopt(_M_MMAP_THRESHOLD, reused_bytes)
        _libc().mallopt(_M_TRIM_THRESHOLD, retained_bytes)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)


@cache
def bulk_threads() -> ThreadPoolExecutor:
    """Returns the process's threads for work that occupies a processor for milliseconds, such as copies of large data.

    The threads have a lower priority than event loops.
    """
    return ThreadPoolExecutor(_BULK_THREADS, "bulk", initializer=lower_thread_priority)


def lower_thread_priority() -> None:
    """Lowers the scheduling priority of the calling thread, so that a busy processor serves event loops first.

    Call it at the start of a thread that copies or reads large amounts of data.
    """
    thread = threading.get_native_id()
    # A process without privileges may not raise the priority of a thread.
    os.setpriority(os.PRIO_PROCESS, thread, max(_BULK_NICENESS, os.getpriority(os.PRIO_PROCESS, thread)))
