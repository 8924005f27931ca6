"""Which requests are served at all: requests of known callers, or without tokens, requests for the own host."""

from contextlib import ExitStack

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from stagemesh.common.errors import PermissionDeniedError, StagemeshError
from stagemesh.gateway.catalog import Callers
from stagemesh.gateway.config import GatewayConfig, Host
from stagemesh.gateway.errors import reject
from stagemesh.gateway.limits import Limits

_PUBLIC, _PUBLIC_FOLDER = frozenset({"/", "/health"}), "/assets/"
"""The paths that need no token, and the folder of others."""
_LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
_EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - the addresses are compared with
_SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
_FOREIGN_SITES = frozenset({"cross-site", "same-site"})


class Access:
    """An ASGI middleware that rejects requests and WebSockets before anything of their content is read.

    If the gateway forwards tokens, an orchestrator must accept the token of the caller. Otherwise, the gateway serves
    everyone who can reach it, which web pages could misuse: it rejects requests for other hosts (DNS rebinding), and
    unsafe requests and WebSockets of pages of other origins.
    """

    def __init__(self, app: ASGIApp, config: GatewayConfig, limits: Limits) -> None:
        self._app, self._limits = app, limits
        self._listen, self._origins = config.listen, frozenset(config.cors_origins)
        listen = Host.parse(config.listen)
        self._named = {host.name for each in config.hosts or () if (host := Host.parse(each)) is not None}
        self._hosts = _LOOPBACK | self._named | (set() if listen is None else {listen.name})
        # An attacker can give another meaning to a name, but not to an address.
        self._allows_addresses = listen is not None and listen.name in _EVERYWHERE

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        connection = HTTPConnection(scope)
        callers: Callers = connection.app.state.callers
        with ExitStack() as used:
            try:
                if not callers.forwards_tokens:
                    self._check_page(connection, own=self._check_host(connection))
                elif scope["path"] not in _PUBLIC and not scope["path"].startswith(_PUBLIC_FOLDER):
                    catalog = used.enter_context((await callers.catalog(connection)).counted_request())
                    await catalog.first()
            except StagemeshError as exc:
                await reject(exc, scope, receive, send)
                return
            await self._limits.serve(self._app, scope, receive, send, caller=callers.name(connection))

    def _check_host(self, connection: HTTPConnection) -> Host:
        """Returns the host that the request names. Raises PermissionDeniedError if it is not this gateway."""
        given = connection.headers.getlist("host")
        if not given and connection.scope.get("http_version") == "1.0":
            # Health checks of proxies send this, and browsers do not.
            given = [self._listen]
        host = Host.parse(given[0]) if len(given) == 1 else None
        if host is None or not (host.name in self._hosts or (self._allows_addresses and host.is_address)):
            raise PermissionDeniedError(
                f"the request is for the host {', '.join(given)[:100]!r}, which is not this gateway; call the address "
                "at which it listens, or let its operator add the name to `hosts` (stagemesh gateway --host NAME)"
            )
        return host

    def _check_page(self, connection: HTTPConnection, *, own: Host) -> None:
        """Raises PermissionDeniedError if a web page of another origin sends an unsafe request or opens a WebSocket.

        The same-origin policy of browsers does not apply to WebSockets and to forms, which a page of any site may send.
        """
        if connection.scope.get("method") in _SAFE_METHODS:
            return
        given = connection.headers.getlist("origin")
        if given and self._origins.issuperset(given):
            return
        origins = [Host.parse(origin.partition("://")[2]) for origin in given]
        is_own = all(each is not None and (each == own or each.name in self._named) for each in origins)
        if not is_own or _FOREIGN_SITES & set(connection.headers.getlist("sec-fetch-site")):
            raise PermissionDeniedError(
                "the request is one of a web page of another origin; serve the page from the gateway's origin, let the "
                "gateway's operator add the page's origin to `cors_origins`, or use tokens"
            )
