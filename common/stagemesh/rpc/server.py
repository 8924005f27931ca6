"""The servers of every service process: gRPC with health checks, reflection and limits, and metrics over HTTP.

A service process creates its server with `Server.of_process`, adds its services, and serves them within
`async with server.serving(...)`.
"""

import asyncio
import errno
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Self, TypeAlias, TypeVar

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from stagemesh.common.errors import NotReadyError
from stagemesh.common.process.config import ClientServiceConfig, ServiceConfig
from stagemesh.rpc.authentication import TokenChecker, by_certificate
from stagemesh.rpc.call_limits import CALLS_PER_CALLER
from stagemesh.rpc.callers import ROLE_NAMES, Role
from stagemesh.rpc.channels import SERVER_OPTIONS
from stagemesh.rpc.credentials import PROCESS, Credentials
from stagemesh.rpc.handlers import streaming
from stagemesh.rpc.interceptors import Gate

_log = logging.getLogger(__name__)

LIVENESS = "liveness"
"""The health name whose status is SERVING from the start of a server until its end, even while it cannot work."""

_HEALTH_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_Request: TypeAlias = health_pb2.HealthCheckRequest
_Response: TypeAlias = health_pb2.HealthCheckResponse
_Servicer = TypeVar("_Servicer")
_Context: TypeAlias = "grpc.aio.ServicerContext[_Request, _Response]"


class Server:
    """A grpc.aio server on one port, with the health service (grpc.health.v1) and reflection.

    Create the server within a running event loop. Register servicers on `Server.grpc` before calling `start`. The
    server serves only the RPCs that at least one of `roles` may call.
    """

    def __init__(
        self,
        listen: str,
        *,
        roles: Collection[Role] = ROLE_NAMES.values(),
        tokens: TokenChecker | None = None,
        health_listen: str | None = None,
        calls_per_caller: int | None = None,
    ) -> None:
        """Creates a server that will listen at `listen` ("host:port").

        `calls_per_caller` is the number of calls that one caller may have running, or None for no limit.

        At `health_listen`, the server also answers health checks without TLS, and nothing else.

        If this process has certificates (`rpc.credentials`), the port serves TLS alone, and callers must have a
        certificate. With `tokens`, they need no certificate, but one of the tokens.
        """
        self._listen, self._tokens, self._tls = listen, tokens, PROCESS.credentials.tls
        authenticate = None if self._tls is None else by_certificate if tokens is None else tokens.authenticate
        gate = Gate(roles, authenticate, calls_per_caller=calls_per_caller)
        self.grpc = grpc.aio.server(interceptors=(gate,), options=SERVER_OPTIONS)
        """The grpc.aio server on which servicers are registered."""
        self._health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self.grpc)
        self._health_listen = health_listen
        self._health_server: grpc.aio.Server | None = None
        self._services = [_HEALTH_NAME, reflection.SERVICE_NAME]

    @classmethod
    def of_process(
        cls, listen: str, config: ServiceConfig, *, roles: Collection[Role], calls_per_caller: int | None = None
    ) -> Self:
        """Creates the main server of a process from the process's config. Sets the credentials of the process.

        Raises InvalidRequestError if the certificates (INVALID_TLS) or the tokens (INVALID_TOKENS) cannot be read.
        """
        PROCESS.use(Credentials(config.tls))
        tokens = config.tokens if isinstance(config, ClientServiceConfig) else None
        checker = None if tokens is None else TokenChecker(tokens)
        return cls(
            listen, roles=roles, tokens=checker, health_listen=config.health_listen, calls_per_caller=calls_per_caller
        )

    def add(self, service: str, register: Callable[[_Servicer, grpc.aio.Server], None], servicer: _Servicer) -> None:
        """Adds a service to the server and to its reflection. Call this method before `start`.

        `service` is the full name of the service, and `register` is the generated function that adds its servicer.
        """
        register(servicer, self.grpc)
        self.reflect(service)

    def reflect(self, service: str) -> None:
        """Adds the service with this full name to the server's reflection. Call this method before `start`."""
        self._services.append(service)

    def set_health(self, *services: str, serving: bool) -> None:
        """Sets the health status of services. The service name "" stands for the whole server."""
        for service in services:
            self._health.set(service, serving=serving)

    @asynccontextmanager
    async def serving(self, *, grace_s: float) -> AsyncGenerator[int]:
        """Serves within the block, as `start` and `stop` do. Yields the bound port number."""
        try:
            yield await self.start()
        finally:
            await self.stop(grace_s=grace_s)

    async def start(self) -> int:
        """Starts the server and returns the bound port number.

        Raises NotReadyError if the port is in use (PORT_IN_USE) or cannot be bound for another reason (CANNOT_LISTEN).
        """
        reflection.enable_server_reflection(self._services, self.grpc)
        credentials = None if self._tls is None else self._tls.server_credentials(ask_certificate=self._tokens is None)
        port = _bind(self.grpc, self._listen, credentials)
        if self._health_listen is not None:
            gate = Gate(ROLE_NAMES.values(), calls_per_caller=CALLS_PER_CALLER)
            self._health_server = grpc.aio.server(interceptors=(gate,), options=SERVER_OPTIONS)
            health_pb2_grpc.add_HealthServicer_to_server(self._health, self._health_server)
            _bind(self._health_server, self._health_listen)
            await self._health_server.start()
        await self.grpc.start()
        _log.info("listening on %s:%d", parse_address(self._listen)[0], port)
        return port

    async def stop(self, *, grace_s: float) -> None:
        """Stops the server. Running calls are ended after `grace_s` seconds. Idempotent.

        All health statuses become NOT_SERVING, and new calls are rejected.
        """
        self._health.end()
        await self.grpc.stop(grace_s)
        if self._health_server is not None:
            await self._health_server.stop(None)


class _Health(health_pb2_grpc.HealthServicer):
    """The health service (grpc.health.v1) of a server, with one status for each named service.

    The name "" stands for the whole server. This class replaces the asyncio servicer of grpc_health, which sets a
    status in a coroutine. Synchronous code such as a signal handler cannot await that coroutine.
    """

    def __init__(self) -> None:
        self._statuses: dict[str, int] = {"": _Response.NOT_SERVING, LIVENESS: _Response.SERVING}
        self._changed = asyncio.Event()
        self._ended = False

    def set(self, service: str, *, serving: bool) -> None:
        """Sets the health status of a service and sends the status to the clients that watch the service.

        Does nothing after `end`.
        """
        if not self._ended:
            self._statuses[service] = _Response.SERVING if serving else _Response.NOT_SERVING
            self._wake()

    def end(self) -> None:
        """Sets the health status of all services to NOT_SERVING permanently, and ends all Watch calls."""
        self._statuses = dict.fromkeys(self._statuses, _Response.NOT_SERVING)
        self._ended = True
        self._wake()

    async def Check(self, request: _Request, context: _Context) -> _Response:  # noqa: N802
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"unknown health service {request.service!r}")
        return _Response(status=status)

    @streaming
    async def Watch(self, request: _Request, context: _Context) -> AsyncIterator[_Response]:  # noqa: ARG002, N802
        last: int | None = None
        while True:
            changed, ended = self._changed, self._ended
            status = self._statuses.get(request.service, _Response.SERVICE_UNKNOWN)
            if status != last:
                yield _Response(status=status)
            if ended:
                return
            last = status
            await changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


def _bind(server: grpc.aio.Server, listen: str, credentials: grpc.ServerCredentials | None = None) -> int:
    """Binds a port at `listen` ("host:port"), with TLS if there are credentials. Returns the port number.

    Raises NotReadyError (PORT_IN_USE, CANNOT_LISTEN) if that is not possible.
    """
    host, wanted_port = parse_address(listen)
    try:
        return server.add_secure_port(listen, credentials) if credentials else server.add_insecure_port(listen)
    except RuntimeError as exc:
        raise listen_error(host, wanted_port) from exc


def parse_address(listen: str) -> tuple[str, int]:
    """Returns the host and the port number in `listen`, which has the form "host:port".

    Raises NotReadyError (CANNOT_LISTEN) if the form is invalid. Without this check, gRPC would listen on another port
    if the port number is missing or too large.
    """
    host, colon, port = listen.rpartition(":")
    if not (host and colon and port.isdecimal() and int(port) < 1 << 16):
        raise NotReadyError(
            f"cannot listen on {listen!r}: write host:port, for example 127.0.0.1:50051",
            reason="CANNOT_LISTEN",
            metadata={"listen": listen},
        )
    return host.strip("[]"), int(port)


def listen_error(host: str, port: int) -> NotReadyError:
    """Returns the error to raise if a port cannot be bound.

    Tries to bind a socket to the port to find the cause, because gRPC does not report the cause.
    """
    cause, reason = "it was in use a moment ago; try again", "PORT_IN_USE"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, port), family=family).close()
    except OSError as exc:
        cause, reason = exc.strerror or str(exc), "CANNOT_LISTEN"
        if exc.errno == errno.EADDRINUSE:
            cause, reason = "it is in use; end the program that uses it, or serve on another port", "PORT_IN_USE"
    return NotReadyError(
        f"cannot listen on port {port} of {host}: {cause}", reason=reason, metadata={"listen": f"{host}:{port}"}
    )


_COMPUTE_TIMEOUT_S = 5.0
"""Time limit for the event loop to compute the metrics. A scrape that takes longer fails."""


class _LoopCollector(Collector):
    """Collects metrics on the event loop. A thread of the HTTP server calls `collect`."""

    def __init__(self, compute: Callable[[], Iterable[Metric]], labels: Mapping[str, str]) -> None:
        self._compute_on_loop, self._labels = compute, labels
        self._loop = asyncio.get_running_loop()
        self._process = ProcessCollector(registry=None)

    def collect(self) -> Iterable[Metric]:
        computing = asyncio.run_coroutine_threadsafe(self._compute(), self._loop)
        for metric in (*computing.result(_COMPUTE_TIMEOUT_S), *self._process.collect()):
            if self._labels:
                metric.samples = [
                    sample._replace(labels={**sample.labels, **self._labels}) for sample in metric.samples
                ]
            yield metric

    async def _compute(self) -> list[Metric]:
        return list(self._compute_on_loop())


@asynccontextmanager
async def serving_metrics(
    compute: Callable[[], Iterable[Metric]], listen: str, *, labels: Mapping[str, str] | None = None
) -> AsyncGenerator[int]:
    """Serves metrics at the address `listen` ("host:port") while the block runs. Yields the port number.

    Raises NotReadyError if the port is in use (PORT_IN_USE) or cannot be bound for another reason (CANNOT_LISTEN).

    - `compute` returns the metrics. It is called on the event loop. The metrics of the process are added to them.
    - `labels` are added to every sample.
    """
    host, port = parse_address(listen)
    registry = CollectorRegistry()
    registry.register(_LoopCollector(compute, labels or {}))
    try:
        # In a thread, because the server looks up the name of its own host.
        server, thread = await asyncio.to_thread(start_http_server, port, host, registry)
    except OSError as exc:
        raise listen_error(host, port) from exc
    _log.info("metrics at %s:%d", host, server.server_port)
    try:
        yield server.server_port
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()
