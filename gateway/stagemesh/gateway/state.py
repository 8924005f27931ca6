"""The state of a gateway: the models that each caller can use."""

from collections import OrderedDict
from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from stagemesh.client import AsyncClient, ClientOptions, RetryPolicy
from stagemesh.common.errors import PermissionDeniedError, UnauthenticatedError
from stagemesh.gateway.catalog import Catalog, Model

_MAX_CALLERS = 128
"""The number of callers whose connections are kept."""
_BEARER = "bearer "
_PROTOCOL_OF_TOKEN = "openai-insecure-api-key."  # noqa: S105 - the prefix of a token
_RETRIES = RetryPolicy(max_asked_pause_s=0)
"""A request that is rejected for the load of its pipeline is not repeated: clients of HTTP do that themselves."""


class Callers:
    """The catalogs of callers, each with connections that present the caller's own token."""

    def __init__(self, servers: Sequence[Sequence[str]], tls: str | None, *, forwards_tokens: bool) -> None:
        self._servers, self._tls = servers, tls
        self._forwards_tokens = forwards_tokens
        self._catalogs = OrderedDict[str, Catalog]()

    async def catalog(self, request: HTTPConnection) -> Catalog:
        """Returns the catalog of the caller of a request. Raises UnauthenticatedError if the caller needs a token."""
        token = ""
        if self._forwards_tokens:
            token = _token(request)
            if not token:
                raise UnauthenticatedError(
                    "the request has no token; send Authorization: Bearer TOKEN", reason="NO_TOKEN"
                )
            if not (token.isascii() and token.isprintable()):
                raise UnauthenticatedError("the token has characters that no token has", reason="INVALID_TOKEN")
        elif not _has_own_origin(request):
            # The same-origin policy of browsers does not apply to WebSockets, which a page of any site may open.
            raise PermissionDeniedError(
                "the request is one of a web page of another origin; serve the page from the gateway's origin, or use "
                "tokens",
            )
        catalog = self._catalogs.pop(token, None) or self._connect(token)
        self._catalogs[token] = catalog
        if len(self._catalogs) > _MAX_CALLERS:
            await self._drop_idle()
        return catalog

    async def close(self) -> None:
        """Closes all connections."""
        for catalog in self._catalogs.values():
            await catalog.close()

    def _connect(self, token: str) -> Catalog:
        options: ClientOptions = {"retry_policy": _RETRIES}
        if self._tls is not None:
            options["tls"] = self._tls
        if self._forwards_tokens:
            options["token"] = token
        clients = [AsyncClient(*addresses, **options) for addresses in self._servers]
        return Catalog(clients, is_shared=not self._forwards_tokens)

    async def _drop_idle(self) -> None:
        """Closes the connections of the caller whose last request is the oldest, among those without a request.

        Never closes those of the newest caller.
        """
        for token, catalog in list(self._catalogs.items())[:-1]:
            if not catalog.is_used:
                del self._catalogs[token]
                await catalog.close()
                return


async def find_model(request: HTTPConnection, model_id: str) -> Model:
    """Returns a model of the caller of a request. Raises the errors of `Callers.catalog` and `Catalog.find`."""
    callers: Callers = request.app.state.callers
    return await (await callers.catalog(request)).find(model_id)


async def find_owner(request: HTTPConnection) -> str:
    """Returns the owner of what the caller of a request stores. Raises the errors of `Callers.catalog` and
    `Catalog.owner`.
    """
    callers: Callers = request.app.state.callers
    return await (await callers.catalog(request)).owner()


def offered_protocol(websocket: HTTPConnection) -> str | None:
    """Returns the subprotocol of OpenAI's realtime API, if the caller has offered it."""
    return next((each for each in _protocols(websocket) if not each.startswith(_PROTOCOL_OF_TOKEN)), None)


def _token(request: HTTPConnection) -> str:
    """Returns the token of a request, or an empty text.

    Web pages cannot set headers of a WebSocket. OpenAI's clients offer the token as one of its subprotocols.
    """
    header = request.headers.get("authorization", "")
    if header.lower().startswith(_BEARER):
        return header[len(_BEARER) :].strip()
    return next(
        (each.removeprefix(_PROTOCOL_OF_TOKEN) for each in _protocols(request) if each.startswith(_PROTOCOL_OF_TOKEN)),
        "",
    )


def _protocols(request: HTTPConnection) -> list[str]:
    return [each.strip() for each in request.headers.get("sec-websocket-protocol", "").split(",") if each.strip()]


def _has_own_origin(request: HTTPConnection) -> bool:
    origin = request.headers.get("origin")
    return request.scope["type"] != "websocket" or origin is None or urlsplit(origin).netloc == request.headers["host"]
