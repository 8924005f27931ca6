"""Local sockets: connections between two replicas on one host. Each replica detects immediately if its peer terminates.

A consumer listens on an abstract unix socket with a random name, and sends the name to its producers over gRPC. A
producer that can connect to the socket shares the consumer's kernel and network namespace, as the containers of one pod
do. The producer passes the file descriptor of its arena with the first byte. On another host, the connection attempt
fails.
"""

import asyncio
import contextlib
import errno
import logging
import os
import secrets
import socket
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from stagemesh.common.tasks import end_tasks, kept_in

_log = logging.getLogger(__name__)

_SO_PEERPIDFD = 77
_PREFIX = "stagemesh-"
_HANDSHAKE_S = 2.0
_BACKLOG = 64


class LocalProducer(NamedTuple):
    """A producer on this host that has connected to the local socket."""

    connection: socket.socket
    arena_fd: int | None
    """The file descriptor of the producer's arena, or None if the arena is private."""


class LocalListener:
    """Listens for local streams of producers on this host. Create it within a running event loop."""

    def __init__(self, accepted: Callable[[LocalProducer], Awaitable[None]]) -> None:
        """Starts listening.

        Calls `accepted` with each producer that connects. `accepted` must close the producer's socket and file
        descriptor.
        """
        self.name = _PREFIX + secrets.token_hex(16)
        self._accepted = accepted
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._socket.bind("\0" + self.name)
        self._socket.listen(_BACKLOG)
        self._handshakes: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._accept)

    async def close(self) -> None:
        """Stops listening and cancels unfinished handshakes. Idempotent."""
        if self._socket.fileno() >= 0:
            self._loop.remove_reader(self._socket)
            self._socket.close()
        await end_tasks(self._handshakes)

    def _accept(self) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:
            # The producer has disconnected, or this process has temporarily reached its limit of descriptors.
            return
        connection.setblocking(False)
        kept_in(self._handshakes, self._loop.create_task(self._shake_hands(connection), name="local handshake"))

    async def _shake_hands(self, connection: socket.socket) -> None:
        try:
            _check_user(connection)
            async with asyncio.timeout(_HANDSHAKE_S):
                arena_fd = await _receive_fd(connection)
        except (OSError, TimeoutError) as exc:
            _log.warning("a local stream was rejected: %s", exc or "it did not begin in time")
            connection.close()
        except asyncio.CancelledError:
            connection.close()
            raise
        else:
            await self._accepted(LocalProducer(connection, arena_fd))


async def dial(name: str, *, arena_fd: int | None) -> socket.socket:
    """Connects to the consumer's local socket `name`. Passes the file descriptor `arena_fd`, if any, to the consumer.

    Raises OSError if the consumer is not on this host or belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        # Does not block, because an abstract socket accepts or refuses immediately.
        connection.connect("\0" + name)
        _check_user(connection)
        socket.send_fds(connection, [b"\0"], [] if arena_fd is None else [arena_fd])
    except BaseException:
        connection.close()
        raise
    return connection


def watch_peer(connection: socket.socket, died: Callable[[], None]) -> "DeathWatch | None":
    """Starts a watch that calls `died` when the process at the other end of `connection` terminates.

    Returns None if the system does not allow watching that process.
    """
    pidfd = _open_peer_pidfd(connection)
    return DeathWatch(pidfd, died) if pidfd is not None else None


class DeathWatch:
    """Watches the process of the process file descriptor `pidfd`. Calls `died` when the process terminates.

    The watch owns `pidfd` and closes it.
    """

    def __init__(self, pidfd: int, died: Callable[[], None]) -> None:
        self._pidfd = pidfd
        self._died = died
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(pidfd, self._fire)

    def close(self) -> None:
        """Stops watching and closes the process file descriptor. Idempotent."""
        if self._pidfd >= 0:
            self._loop.remove_reader(self._pidfd)
            os.close(self._pidfd)
            self._pidfd = -1

    def _fire(self) -> None:
        self.close()
        self._died()


def _check_user(connection: socket.socket) -> None:
    _, user, _ = _credentials(connection)
    if user != os.geteuid():
        raise PermissionError(errno.EPERM, "the process at the other end belongs to another user")


def _open_peer_pidfd(connection: socket.socket) -> int | None:
    with contextlib.suppress(OSError):
        return int.from_bytes(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD, 4), sys.byteorder)
    with contextlib.suppress(OSError):
        # Kernels before 6.5 lack this option. The process id is 0 if the process is in an invisible pid namespace.
        process_id, _, _ = _credentials(connection)
        return os.pidfd_open(process_id) if process_id else None
    return None


def _credentials(connection: socket.socket) -> tuple[int, int, int]:
    """Returns the process id, user id and group id of the process at the other end of a socket."""
    layout = struct.Struct("3i")
    process_id, user, group = layout.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size))
    return process_id, user, group


async def _receive_fd(connection: socket.socket) -> int | None:
    loop = asyncio.get_running_loop()
    readable: asyncio.Future[None] = loop.create_future()
    loop.add_reader(connection, lambda: None if readable.done() else readable.set_result(None))
    try:
        await readable
    finally:
        loop.remove_reader(connection)
    first_byte, fds, _, _ = socket.recv_fds(connection, 1, 1)
    if not first_byte:
        raise ConnectionAbortedError("the producer did not begin the stream")
    return fds[0] if fds else None
