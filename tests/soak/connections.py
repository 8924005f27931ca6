"""Severs the connections of another process, like a pulled cable. TCP connections are reset, so that data in flight is
lost. Local streams (abstract unix sockets) end for both sides. Sockets that are not connections of the mesh stay open:
listening sockets, and the socket pairs by which an event loop wakes itself.
"""

import ctypes
import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_SYS_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def sever(process_id: int) -> int:
    """Severs all connections of a process and returns their number. Raises OSError if the system does not permit it."""
    with _process(process_id) as process:
        return sum(_severed(process, descriptor) for descriptor in _sockets(process_id))


@contextmanager
def _process(process_id: int) -> Iterator[int]:
    process = os.pidfd_open(process_id)
    try:
        yield process
    finally:
        os.close(process)


def _sockets(process_id: int) -> list[int]:
    sockets = list[int]()
    for link in Path(f"/proc/{process_id}/fd").iterdir():
        with suppress(FileNotFoundError):
            if link.readlink().name.startswith("socket:"):
                sockets.append(int(link.name))
    return sockets


def _severed(process: int, descriptor: int) -> bool:
    copy = _libc.syscall(_SYS_PIDFD_GETFD, process, descriptor, 0)
    if copy < 0:
        error = ctypes.get_errno()
        # The process may have closed it meanwhile.
        if error not in {errno.EBADF, errno.ESRCH}:
            raise OSError(error, f"cannot take sockets of another process: {os.strerror(error)}")
        return False
    with socket.socket(fileno=copy) as connection, suppress(OSError):
        peer, own = connection.getpeername(), connection.getsockname()
        if connection.family in {socket.AF_INET, socket.AF_INET6}:
            _reset(copy)
            return True
        if connection.family == socket.AF_UNIX and (_is_abstract(peer) or _is_abstract(own)):
            connection.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _is_abstract(name: str | bytes) -> bool:
    """Returns whether a unix socket is a local stream. Sockets with a path belong to an engine and its worker
    processes, which cannot recover from a lost connection.
    """
    return isinstance(name, bytes) and name.startswith(b"\0")


def _reset(descriptor: int) -> None:
    """Resets a TCP connection by connect() with AF_UNSPEC: the kernel sends RST and drops queued data."""
    nowhere = (ctypes.c_char * 16)()
    if _libc.connect(descriptor, nowhere, len(nowhere)) != 0:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
