"""Limits the number of open WebSockets."""

from typing import TYPE_CHECKING

from starlette.websockets import WebSocket

from stagemesh.common.errors import OverloadedError
from stagemesh.gateway.errors import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

_RETRY_AFTER_S = 5.0


class WebSocketLimit:
    """An ASGI middleware that rejects WebSockets with status 429 while `most` are open."""

    def __init__(self, app: "ASGIApp", most: int) -> None:
        self._app, self._most = app, most
        self._open = 0

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        if self._open >= self._most:
            error = OverloadedError(
                f"{self._open} WebSockets are open, which is the limit of this gateway; connect later, or use another "
                "gateway",
                reason="CALL_LIMIT",
                retry_after_s=_RETRY_AFTER_S,
            )
            await WebSocket(scope, receive, send).send_denial_response(error_response(error))
            return
        self._open += 1
        try:
            await self._app(scope, receive, send)
        finally:
            self._open -= 1
