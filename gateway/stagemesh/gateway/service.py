"""Creates the HTTP application of a gateway with its page and its metrics, and serves it."""

import asyncio
import logging
import socket
import ssl
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stagemesh.common.errors import InvalidRequestError, StagemeshError
from stagemesh.gateway.access import Access
from stagemesh.gateway.answers import HEARTBEAT
from stagemesh.gateway.catalog import Callers
from stagemesh.gateway.config import GatewayConfig
from stagemesh.gateway.connections import HttpConnection, WebSocketConnection
from stagemesh.gateway.errors import on_error, reject_path
from stagemesh.gateway.limits import BODY_S, Limits
from stagemesh.gateway.parameters import Policy
from stagemesh.gateway.realtime import connection
from stagemesh.gateway.responses.store import ResponseStore
from stagemesh.gateway.routes import chat, completions, images, models, speech, tokens, transcriptions, videos, voices
from stagemesh.gateway.routes import responses as response_routes
from stagemesh.gateway.voices import VoiceStore
from stagemesh.rpc.credentials import CERTIFICATE, KEY, Credentials
from stagemesh.rpc.server import listen_error, parse_address, serving_metrics

_FILES = StaticFiles(directory=Path(__file__).parent / "page")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_PAGE_HEADERS = {
    # A browser keeps the files, and asks with their ETag whether they have changed.
    "Cache-Control": "no-cache",
    "Content-Security-Policy": _POLICY,
    "Permissions-Policy": "microphone=(self), camera=(), geolocation=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


async def read_page(request: Request) -> Response:
    """Returns the page, or one of its scripts, style sheets and images."""
    name = request.path_params.get("name")
    response = await _FILES.get_response("index.html" if name is None else f"assets/{name}", request.scope)
    response.headers.update(_PAGE_HEADERS)
    return response


_GRACE_S = 10
_log = logging.getLogger(__name__)


def create_app(config: GatewayConfig) -> FastAPI:
    """Returns the application. Connects to the orchestrators when they are needed."""
    registry, limits = CollectorRegistry(), Limits(config)
    forwards = config.tls is not None and not (Path(config.tls) / CERTIFICATE).exists()
    if "*" in config.cors_origins and not forwards:
        # Otherwise, every web page could use the gateway of a user who opens it.
        raise InvalidRequestError('cors_origins: "*" needs tokens of callers; name origins', reason="INVALID_CONFIG")

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[dict[str, Any]]:
        app.state.callers = callers = Callers(
            config.servers, config.tls, forwards_tokens=forwards, aliases=config.aliases
        )
        yield {"limits": limits, "tls": app.state.tls, "waiting": {}}
        await callers.close()

    app = FastAPI(title="Stagemesh", lifespan=lifespan, openapi_url=None)
    app.state.metrics, app.state.tls = registry, None
    app.state.voices = None if config.voices is None else VoiceStore(Path(config.voices))
    app.state.responses = ResponseStore(config)
    for module in (chat, completions, images, models, connection, speech, tokens, transcriptions, videos, voices):
        app.include_router(module.router)
    app.include_router(response_routes.router)
    if config.page:
        app.add_api_route("/", read_page)
        app.add_api_route("/assets/{name}", read_page)

    @app.get("/health")
    async def read_health() -> dict[str, str]:
        """Reports that the gateway serves. `/v1/models` lists the pipelines that can be reached."""
        return {"status": "ok"}

    for route in app.routes:
        if isinstance(route, Route) and route.methods is not None and "GET" in route.methods:
            route.methods.add("HEAD")
    for kind in (StagemeshError, RequestValidationError, HTTPException, RecursionError, Exception):
        app.add_exception_handler(kind, on_error)
    app.router.default = reject_path
    app.add_middleware(Policy, config=config, registry=registry)
    app.add_middleware(Access, config=config, limits=limits)
    if config.cors_origins:
        every = ["*"]
        app.add_middleware(
            CORSMiddleware, config.cors_origins, allow_methods=every, allow_headers=every, expose_headers=every
        )
    app.add_middleware(Metrics, registry=registry)
    return app


async def serve(config: GatewayConfig, stopping: asyncio.Event) -> None:
    """Serves until `stopping` is set. Running requests then have 10 seconds to end.

    Raises NotReadyError if a port cannot be bound, and InvalidRequestError (INVALID_TLS) if a certificate is missing
    or damaged.
    """
    # Each caller has credentials of its own, which are made of this folder when its first request arrives.
    Credentials(config.tls, needs_certificate=False)
    app = create_app(config)
    app.state.tls = None if config.https is None else _https_context(Path(config.https))
    settings = uvicorn.Config(
        app,
        http=HttpConnection,
        ws=WebSocketConnection,
        # A compressed message could be a thousand times as large.
        ws_per_message_deflate=False,
        # With each ping, the time of a message that has not arrived completely is checked.
        ws_ping_interval=BODY_S,
        ws_ping_timeout=BODY_S,
        timeout_keep_alive=config.keep_alive_s,
        limit_concurrency=config.max_connections + 1,
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=_GRACE_S,
        # Callers are known by their connections, and not by headers that they send.
        proxy_headers=False,
    )
    async with AsyncExitStack() as stack:
        bound = stack.enter_context(_bind(config.listen))
        if config.metrics_listen is not None:
            await stack.enter_async_context(serving_metrics(app.state.metrics.collect, config.metrics_listen))
        _log.info("listening on %s:%d", *bound.getsockname()[:2])
        server = _Server(settings)
        serving = asyncio.create_task(server.serve([bound]))
        waiting = asyncio.create_task(stopping.wait())
        await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        server.should_exit = True
        await serving


class _Server(uvicorn.Server):
    """A server in a process that handles signals itself."""

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        yield


def _bind(listen: str) -> socket.socket:
    """Returns a socket that listens at an address. Raises NotReadyError (PORT_IN_USE, CANNOT_LISTEN) if it cannot."""
    host, port = parse_address(listen)
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as exc:
        raise listen_error(host, port) from exc


def _https_context(folder: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    try:
        # Without a password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(folder / CERTIFICATE, folder / KEY, password="")
    except OSError as exc:
        raise InvalidRequestError(
            f"{folder / CERTIFICATE} and {KEY} cannot be used, which `https` needs: {exc}", reason="INVALID_TLS"
        ) from exc
    return context


_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_OTHER = "other"


class Metrics:
    """An ASGI middleware that counts and times requests."""

    def __init__(self, app: ASGIApp, registry: CollectorRegistry) -> None:
        self._app = app
        self._requests = Counter(
            "stagemesh_gateway_requests",
            "HTTP requests that have ended, by endpoint and status.",
            ["endpoint", "status"],
            registry=registry,
        )
        self._running = Gauge(
            "stagemesh_gateway_running_requests", "HTTP requests that are being answered.", registry=registry
        )
        self._sockets = Gauge("stagemesh_gateway_open_websockets", "Open WebSockets.", registry=registry)
        times = partial(Histogram, labelnames=["endpoint"], buckets=_SECONDS, registry=registry)
        self._first_s = times(
            "stagemesh_gateway_first_byte_seconds", "Time from a request to the first byte of its answer's body."
        )
        self._whole_s = times("stagemesh_gateway_request_seconds", "Time from a request to the end of its answer.")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            with self._sockets.track_inprogress() if scope["type"] == "websocket" else nullcontext():
                await self._app(scope, receive, send)
            return
        began_s, first_s, status = time.perf_counter(), 0.0, 499

        async def observe(message: Message) -> None:
            nonlocal first_s, status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not first_s and message.get("body") not in (None, b"", HEARTBEAT):
                first_s = time.perf_counter() - began_s
            await send(message)

        with self._running.track_inprogress():
            try:
                await self._app(scope, receive, observe)
            finally:
                route = scope.get("route")
                endpoint = _OTHER if route is None else route.path
                self._requests.labels(endpoint, str(status)).inc()
                self._whole_s.labels(endpoint).observe(time.perf_counter() - began_s)
                if first_s:
                    self._first_s.labels(endpoint).observe(first_s)
