"""The metrics of a gateway: HTTP requests by endpoint and status, and their times."""

import time
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_OTHER = "other"


class Metrics:
    """An ASGI middleware that counts and times requests."""

    def __init__(self, app: "ASGIApp", registry: CollectorRegistry) -> None:
        self._app = app
        ProcessCollector(registry=registry)
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

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "websocket":
            with self._sockets.track_inprogress():
                await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s, first_s, status = time.perf_counter(), 0.0, 499

        async def observe(message: "Message") -> None:
            nonlocal first_s, status
            if message["type"] == "http.response.start":
                status = message["status"]
            elif not first_s and message.get("body"):
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
