"""Rejects HTTP requests whose body is too large, before the body is read."""

from typing import TYPE_CHECKING

from stagemesh.common.errors import InvalidRequestError
from stagemesh.gateway.errors import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_TOO_LARGE = 413


class BodyLimit:
    """An ASGI middleware that ends requests with status 413 whose body exceeds a number of bytes."""

    def __init__(self, app: "ASGIApp", max_bytes: int) -> None:
        self._app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit():
            # The server reads no more than this.
            app = self._app if int(length) <= self._max_bytes else self._reject
            await app(scope, receive, send)
            return
        received, rejected = 0, False

        async def limited() -> "Message":
            nonlocal received, rejected
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                # A body of unknown length: the rest is not read.
                rejected = True
                raise InvalidRequestError(f"the body exceeds {self._max_bytes} bytes", reason="MESSAGE_TOO_LARGE")
            return message

        started = False

        async def track(message: "Message") -> None:
            nonlocal started
            if not rejected:
                started = True
                await send(message)

        try:
            await self._app(scope, limited, track)
        except InvalidRequestError:
            if not rejected:
                raise
        if rejected and not started:
            await self._reject(scope, receive, send)

    async def _reject(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        error = InvalidRequestError(
            f"the body exceeds {self._max_bytes} bytes; send less, or upload large files to the pipeline's store",
            reason="MESSAGE_TOO_LARGE",
        )
        response = error_response(error)
        response.status_code = _TOO_LARGE
        response.headers["Connection"] = "close"
        await response(scope, receive, send)
