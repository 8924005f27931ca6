"""The port at which vLLM's KV connector answers its peers."""

import socket

from stagemesh.common.errors import NotReadyError
from stagemesh.common.settings import library_variable

_PORT_RANGE = "UCX_TCP_PORT_RANGE"
"""UCX's variable for its ports, such as "18600-18663". Where it is set, firewalls open no other ports."""
_ANYWHERE = frozenset({"0.0.0.0", "[::]", ""})  # noqa: S104  # compared, not bound


class SideChannel:
    """Chooses a free port and keeps other processes from taking it until vLLM listens there.

    vLLM cannot choose a port itself, and would wait forever if the port was taken. A socket that is bound but does not
    listen reserves the port: the kernel gives it to no other program, but lets vLLM listen on it.
    """

    def __init__(self, address: str) -> None:
        """`address` is the replica's address, "host:port", whose host its peers can reach."""
        host = address.rpartition(":")[0]
        self.host = socket.gethostname() if host in _ANYWHERE else host.strip("[]")
        """The host at which vLLM listens, and at which its peers reach it."""
        self._reserved: socket.socket | None = None

    def reserve(self) -> int:
        """Returns the reserved port. Raises NotReadyError (LOAD_FAILED) if there is none."""
        self.close()
        cause: OSError | None = None
        for port in _candidates():
            try:
                self._reserved = self._bind(port)
            except OSError as exc:
                cause = exc
            else:
                number: int = self._reserved.getsockname()[1]
                return number
        raise NotReadyError(
            f"no port of {self.host} is free for the hand-over of KV caches: {cause}", reason="LOAD_FAILED"
        )

    def close(self) -> None:
        """Ends the reservation. Idempotent."""
        reserved, self._reserved = self._reserved, None
        if reserved is not None:
            reserved.close()

    def _bind(self, port: int) -> socket.socket:
        family, _, _, _, address = socket.getaddrinfo(self.host, port, type=socket.SOCK_STREAM)[0]
        reserved = socket.socket(family, socket.SOCK_STREAM)
        try:
            reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            reserved.bind(address)
        except OSError:
            reserved.close()
            raise
        return reserved


def _candidates() -> list[int]:
    first, _, last = library_variable(_PORT_RANGE).partition("-")
    if first.isdecimal() and last.isdecimal():
        return list(range(int(last), int(first) - 1, -1))
    return [0]
