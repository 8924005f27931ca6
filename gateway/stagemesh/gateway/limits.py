"""The limits of callers: shares of connections, of WebSockets and of memory, and the bytes of rejected requests."""

import asyncio
import socket
import zlib
from collections import Counter
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stagemesh.common.errors import CancelledRequestError, Code, InvalidRequestError, OverloadedError, StagemeshError
from stagemesh.gateway.config import GatewayConfig
from stagemesh.gateway.errors import reject
from stagemesh.rpc.call_limits import RejectedBytes
from stagemesh.rpc.channels import MAX_FIELDS

CALLER = ContextVar("caller", default="")
"""The caller whose request or WebSocket is served."""
BODY_S, BODY_BYTES_PER_S = 20.0, 65_536
"""A body, or a message of a WebSocket, must arrive within this time, and a second for this number of bytes."""
_FAULTS = {Code.INVALID_ARGUMENT, Code.ALREADY_EXISTS, Code.NOT_FOUND, Code.PERMISSION_DENIED, Code.UNIMPLEMENTED}
"""The codes of errors that are due to the content of a request, in addition to errors with the reason `_FULL`."""
_FULL = "SESSION_TOO_LARGE"
_VALUE_BYTES, _FREE_BYTES = 512, 64 << 10
_DECODERS = 2
_GZIP, _GZIP_BITS, _PART_BYTES = "gzip", 31, 1 << 20
_WEIGHT = 4
"""An orchestrator may know all callers of a gateway as one. Each may therefore use a quarter of its limit."""


def name_of_host(address: str) -> str:
    """Returns the name of a host for limits. The addresses of an IPv6 network (/64) have the same, as one host has."""
    if ":" not in address:
        return address
    return socket.inet_pton(socket.AF_INET6, address.partition("%")[0])[:8].hex()


class Shares:
    """An amount that callers share. Each may hold half of what the others leave."""

    def __init__(self, total: int) -> None:
        self._free = total
        self._held = Counter[str]()

    def hold(self, caller: str, amount: int) -> bool:
        """Adds an amount to what a caller holds, or releases it if it is negative. Returns False if it is too large."""
        held = self._held[caller] + amount
        if amount > 0 and held > (self._free + self._held[caller] + 1) // 2:
            return False
        self._free -= amount
        self._held[caller] = held
        if not held:
            del self._held[caller]
        return True


class Limits:
    """The amounts that the callers of a gateway share, and the bytes of their rejected requests.

    - A body has at most `max_body_bytes`. A larger one is rejected when it is announced, or when it exceeds them.
    - It arrives within 20 s and a second for each 64 KiB.
    - It is not read while its caller must wait, because too much of what the caller sent was rejected.
    - Two audio files of a caller are decoded at the same time, and its other files wait.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.max_body_bytes = config.max_body_bytes
        self.connections, self.websockets = Shares(config.max_connections), Shares(config.max_websockets)
        self.memory = Shares(max(config.max_bodies_bytes, 2 * config.max_body_bytes))
        self.decoders, self.rejected = WeakValueDictionary[str, asyncio.Semaphore](), RejectedBytes()

    async def serve(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send, *, caller: str) -> None:
        """Serves a request or a WebSocket of a caller with an application, unless it exceeds a limit."""
        CALLER.set(caller)
        sender = scope["sender"] = Sender(self, caller)
        # What a WebSocket keeps counts as well as the message that is being handled.
        kept = scope["kept"] = Sender(self, caller)
        websockets = int(scope["type"] == "websocket")
        headers = Headers(scope=scope)
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self.max_body_bytes:
            await reject(self._too_large(), scope, receive, send)
        elif not websockets and scope["method"] == "POST" and (pause_s := sender.pause_s()) > 0:
            problem = "too many large requests of the caller were rejected; correct them, and retry later"
            await reject(OverloadedError(problem, reason="CALL_LIMIT", retry_after_s=pause_s), scope, receive, send)
        elif headers.get("content-encoding", _GZIP).lower() not in {_GZIP, "identity"}:
            await reject(
                InvalidRequestError("the Content-Encoding is unknown; send gzip or none"), scope, receive, send
            )
        elif not self.websockets.hold(caller, websockets):
            problem = "the open WebSockets reach the limit of this gateway; close some, or connect later"
            await reject(OverloadedError(problem, reason="CALL_LIMIT", retry_after_s=5.0), scope, receive, send)
        else:
            try:
                await app(scope, receive if websockets else self._limited(receive, sender, headers), send)
            finally:
                self.websockets.hold(caller, -websockets)
                sender.hold(0)
                kept.hold(0)

    def _limited(self, receive: Receive, sender: "Sender", headers: Headers) -> Receive:
        """Returns a function that receives a body within its limits."""
        # The commas of files are not values. `read_form` counts the commas of fields.
        is_form = headers.get("content-type", "").lower().startswith("multipart/")
        is_gzip = headers.get("content-encoding", "").lower() == _GZIP
        decoder = zlib.decompressobj(_GZIP_BITS) if is_gzip else None
        until_s: float | None = asyncio.get_running_loop().time() + BODY_S
        received = 0

        async def limited() -> Message:
            nonlocal received, until_s
            try:
                async with asyncio.timeout_at(until_s):
                    message = await receive()
            except TimeoutError:
                raise InvalidRequestError(f"only {received} bytes of the body have arrived in time") from None
            if message["type"] == "http.disconnect" and until_s is not None:
                raise CancelledRequestError("the caller disconnected", reason="CALLER_DISCONNECTED")
            content, has_more = message.get("body", b""), message.get("more_body", False)
            until_s = until_s + len(content) / BODY_BYTES_PER_S if until_s and has_more else None
            parts = list[bytes]()
            for part in [content] if decoder is None else _decompressed(decoder, content, is_last=not has_more):
                received += len(part)
                sender.add(len(part), values=0 if is_form else part.count(b","))
                if received > self.max_body_bytes:
                    raise self._too_large()
                parts.append(part)
                if decoder is not None:
                    await asyncio.sleep(0)
            return message if decoder is None else {**message, "body": b"".join(parts)}

        return limited

    def _too_large(self) -> InvalidRequestError:
        return InvalidRequestError(
            f"the body exceeds {self.max_body_bytes} bytes; send less, or upload large files to the pipeline's store",
            reason="MESSAGE_TOO_LARGE",
        )


def _decompressed(decoder: Any, data: bytes, *, is_last: bool) -> Iterator[bytes]:
    """Yields the content of a part of a body, 1 MiB at a time. Raises InvalidRequestError if it is damaged.

    `decoder` is a `zlib.decompressobj`.
    """
    try:
        while part := decoder.decompress(data, _PART_BYTES):
            yield part
            data = decoder.unconsumed_tail
    except zlib.error:
        raise InvalidRequestError("the body is not gzip, which its Content-Encoding states") from None
    if decoder.unused_data or (is_last and not decoder.eof):
        raise InvalidRequestError("the body is not one complete gzip stream, which its Content-Encoding states")


class Sender:
    """The caller of a request or of a WebSocket: the memory of what it has sent, and whether that was rejected."""

    def __init__(self, limits: Limits, caller: str) -> None:
        self._limits, self._caller = limits, caller
        self.held_bytes = self._size_bytes = self._values = 0

    def hold(self, size_bytes: int) -> bool:
        """Counts the memory that the caller's content uses now. Returns False if the caller's share is smaller."""
        if not self._limits.memory.hold(self._caller, size_bytes - self.held_bytes):
            return False
        self.held_bytes = size_bytes
        return True

    def add(self, size_bytes: int, *, values: int = 0) -> None:
        """Adds to the content of a request. Raises OverloadedError if its memory exceeds the caller's share."""
        if not self.hold(self.held_bytes + size_bytes):
            raise OverloadedError(
                "the bodies of running requests have the size that this gateway can hold; try again later, or use "
                "another gateway",
                reason="CALL_LIMIT",
                retry_after_s=1.0,
            )
        self._size_bytes, self._values = self._size_bytes + size_bytes, self._values + values

    def decoders(self) -> asyncio.Semaphore:
        """Returns the lock within which a file of the caller is decoded."""
        return self._limits.decoders.setdefault(self._caller, asyncio.Semaphore(_DECODERS))

    def for_event(self) -> "Sender":
        """Returns the same caller as the sender of one event of a WebSocket, which waits for its turn."""
        waiting = Sender(self._limits, self._caller)
        waiting.add(self.content_bytes)
        return waiting

    def begin(self, event: bytes) -> None:
        """Begins an event, which is the content that may be rejected from now on."""
        self._size_bytes, self._values = len(event), event.count(b",")

    @property
    def content_bytes(self) -> int:
        """The size of the newest content, in which each value counts."""
        return self._size_bytes + _VALUE_BYTES * min(self._values, MAX_FIELDS)

    def reject(self, error: StagemeshError, *, size_bytes: int | None = None) -> None:
        """Counts the content as rejected, once, if the error is due to it. Small content with few values is free.

        `size_bytes` is the size of what was rejected if that is the prompt of a response, and not the newest content.
        """
        if error.code in _FAULTS or error.reason == _FULL:
            if size_bytes is None:
                size_bytes = self.content_bytes
                self._size_bytes = self._values = 0
            self.charge(size_bytes)

    def charge(self, size_bytes: int) -> None:
        """Counts the bytes of accepted work like rejected bytes, because the work takes time from all callers."""
        self._limits.rejected.add(self._caller, _WEIGHT * max(0, size_bytes - _FREE_BYTES))

    def pause_s(self) -> float:
        """Returns the time for which the caller must wait, because too much was rejected. 0 or less if it need not."""
        return self._limits.rejected.over_s(self._caller)
