"""Selects and checks TCP ports for services on this machine."""

import errno
import random
import socket

from stagemesh.common.errors import InvalidRequestError, NotReadyError

HOST = "127.0.0.1"
# These ports are below the range that kernels use for outgoing connections. Therefore no connection occupies the port
# of a service while the service restarts.
CANDIDATES = range(20000, 32000)
_TRIES = 200
_LAST_PORT = 65535


class PortPicker:
    """Selects free TCP ports of the loopback address. Never selects the same port twice."""

    def __init__(self) -> None:
        self._taken: set[int] = set()

    def pick_after(self, port: int) -> int:
        """Returns `port` + 1, or another free port if `port` + 1 is not free.

        Raises NotReadyError (PORT_IN_USE) if no free port was found.
        """
        following = port + 1
        if following in self._taken or following > _LAST_PORT or _bind_error(HOST, following) is not None:
            return self.pick()
        self._taken.add(following)
        return following

    def pick(self) -> int:
        """Returns a random free port. Raises NotReadyError (PORT_IN_USE) if none of 200 random ports is free."""
        for port in random.sample(CANDIDATES, _TRIES):
            if port not in self._taken and _bind_error(HOST, port) is None:
                self._taken.add(port)
                return port
        raise NotReadyError(
            f"found no free port on {HOST}: tried {_TRIES} ports from {CANDIDATES.start} to {CANDIDATES.stop - 1}; "
            "end programs that listen on them",
            reason="PORT_IN_USE",
        )


def check_listen(listen: str, *, option: str = "--port") -> None:
    """Checks that a service can listen at the address `listen` ("host:port").

    `option` is the command-line option that error messages suggest for the choice of another port. Raises
    InvalidRequestError if `listen` is malformed. Raises NotReadyError (PORT_IN_USE) if the port is in use, and
    NotReadyError (CANNOT_LISTEN) if a service cannot listen there for another reason.
    """
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > _LAST_PORT:
        raise InvalidRequestError(
            f"{listen!r} is not an address; write an address such as {HOST}:7780", reason="INVALID_ADDRESS"
        )
    error = _bind_error(host.strip("[]"), int(port))
    if error is not None and error.errno == errno.EADDRINUSE:
        raise NotReadyError(
            f"port {port} of {host} is in use, possibly by another `stagemesh up`; end that program, or choose another "
            f"port with {option}",
            reason="PORT_IN_USE",
            metadata={"listen": listen},
        )
    if error is not None:
        raise NotReadyError(
            f"cannot listen on {listen}: {error.strerror}; choose another port with {option}", reason="CANNOT_LISTEN"
        )


def _bind_error(host: str, port: int) -> OSError | None:
    # It sets SO_REUSEADDR, as gRPC does. Otherwise, the port of a service that has just exited would seem to be in use.
    try:
        socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET).close()
    except OSError as exc:
        return exc
    return None
