"""TCP ports for services on this machine."""

import errno
import random
import socket

from stagemesh.common.errors import InvalidRequestError, NotReadyError

HOST = "127.0.0.1"
# Below the range that kernels hand out for outgoing connections, so that none takes a port while its service restarts.
CANDIDATES = range(20000, 32000)
_TRIES = 200
_LAST_PORT = 65535


class PortPicker:
    """Picks free ports of the loopback address, none twice."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def pick_beside(self, port: int) -> int:
        """The next port after `port` where that is free, another one where it is not."""
        beside = port + 1
        if beside in self._taken or beside > _LAST_PORT or _bind_error(HOST, beside) is not None:
            return self.pick()
        self._taken.add(beside)
        return beside

    def pick(self) -> int:
        """A free port; raises NotReadyError when none is found."""
        for port in random.sample(CANDIDATES, _TRIES):
            if port not in self._taken and _bind_error(HOST, port) is None:
                self._taken.add(port)
                return port
        raise NotReadyError(
            f"no free port on {HOST} among {_TRIES} tried from {CANDIDATES.start} to {CANDIDATES.stop - 1}; "
            "end some programs that listen there",
            reason="NO_FREE_PORT",
        )


def check_listen(listen: str, *, option: str = "--port") -> None:
    """Raises InvalidRequestError for what is no "host:port", NotReadyError (PORT_IN_USE) where a program holds it."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _LAST_PORT:
        raise InvalidRequestError(f"{listen!r} is no address; write one like {HOST}:7780", reason="CANNOT_LISTEN")
    error = _bind_error(host.strip("[]"), int(port))
    if error is not None and error.errno == errno.EADDRINUSE:
        raise NotReadyError(
            f"port {port} of {host} is in use, perhaps by another `stagemesh up`; end it, or choose a port with "
            f"{option}",
            reason="PORT_IN_USE",
            metadata={"listen": listen},
        )
    if error is not None:
        raise NotReadyError(
            f"cannot listen on {listen}: {error.strerror}; choose a port with {option}", reason="CANNOT_LISTEN"
        )


def _bind_error(host: str, port: int) -> OSError | None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as trial:
        # As gRPC does; or a service that has just ended would seem to be there still.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
            trial.listen(1)
        except OSError as exc:
            return exc
    return None
