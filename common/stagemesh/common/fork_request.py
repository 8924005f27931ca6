"""The requests that the launcher sends to the fork server of stages, over a Unix socket that preserves messages.

With a request, the launcher sends two file descriptors: the log to which the forked process writes its output, and a
pipe to which the server writes two lines, the process's id after the fork and its exit status after its end.
"""

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class ForkRequest:
    """A request to fork a stage's process.

    - `config` is the path of the process's config file.
    - `log` and `status` are file descriptors, which the server owns.
    """

    config: Path
    log: int
    status: int


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Returns the two connected ends of a socket for requests."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_request(server: socket.socket, request: ForkRequest) -> None:
    """Sends a request, with duplicates of its file descriptors. Raises OSError if the server has ended."""
    socket.send_fds(server, [os.fsencode(request.config)], [request.log, request.status])


def receive_request(client: socket.socket) -> ForkRequest | None:
    """Waits for the next request. Returns None if the client has closed its end."""
    with suppress(ConnectionResetError):
        config, descriptors, _, _ = socket.recv_fds(client, _MAX_BYTES, 2)
        if config:
            log, status = descriptors
            return ForkRequest(Path(os.fsdecode(config)), log, status)
    return None
