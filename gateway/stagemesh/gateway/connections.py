"""The connections of callers, with limits of time, number and size that hold before a request is known."""

import asyncio
from ssl import SSLContext
from typing import Any, cast

from uvicorn._types import ASGIReceiveEvent
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.utils import get_remote_addr
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

from stagemesh.common.tasks import kept_in
from stagemesh.gateway import limits
from stagemesh.gateway.limits import Sender, name_of_host

_HEAD_S = 10
"""The time for a TLS handshake, and for headers after the connection, its handshake or their first byte, in seconds."""
_STALLED_S = 60
"""The time within which a peer reads a part of an answer, in seconds."""
_MAX_HEADERS = 128
_MAX_HEAD_BYTES = 64 << 10
"""The limit for bytes that are neither complete headers nor a part of a body. The parser would collect any number."""
_MIN_CHUNK_BYTES, _MAX_SMALL_CHUNKS = 64, 1000
"""A body may have this number of chunks that are smaller."""
_MAX_FRAGMENTS = 1024
_MAX_FRAMES, _MAX_FRAMES_A_SECOND = 10_000, 500
_SLICE_BYTES = 4096
_MAX_UNREAD_BYTES = 32 << 20


class _Transport:
    """The transport of a `_LimitedConnection`, which has a time to end after it was closed."""

    def __init__(self, transport: asyncio.Transport, tcp: asyncio.Transport) -> None:
        self._transport, self._tcp = transport, tcp

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def get_write_buffer_size(self) -> int:
        # The transport of TLS does not count what it has encrypted.
        return sum(each.get_write_buffer_size() for each in {self._transport, self._tcp})

    def close(self) -> None:
        if not self._transport.is_closing():
            self._transport.close()
            self._transport.get_protocol().end_after(_HEAD_S)  # type: ignore[attr-defined]


class _LimitedConnection(asyncio.Protocol):
    """A connection that counts for its host, and ends if its peer does not read in time."""

    app_state: dict[str, Any]
    """The limits, the SSL context or None, and the connections that wait for another request since a time."""
    transport: asyncio.Transport
    host: str | None = None
    """The name of the peer's host, for which the connection counts, or None if it does not count."""
    _timer: asyncio.TimerHandle | None = None

    def end_after(self, seconds: float | None) -> None:
        """Ends the connection after a time, even if its peer does not read. Replaces the last time. None for never.

        If the peer reads a part of an answer within the time, and neither side closes the connection, it begins again.
        """
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None:
            unread_bytes = self.transport.get_write_buffer_size()
            self._timer = asyncio.get_running_loop().call_later(seconds, self._end, seconds, unread_bytes)

    def _end(self, seconds: float, unread_bytes: int) -> None:
        if self.transport.get_write_buffer_size() < unread_bytes and not self.transport.is_closing():
            self._continue_after(seconds)
        else:
            self.transport.abort()

    def _continue_after(self, seconds: float) -> None:
        """Called if the peer has read a part of an answer within the time."""
        self.end_after(seconds)

    def eof_received(self) -> None:
        # The transport would close itself.
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.end_after(None)
        self.release()

    def release(self) -> None:
        """Stops counting the connection for its host."""
        if self.host is not None:
            self.app_state["limits"].connections.hold(self.host, -1)
            self.host = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self.end_after(_STALLED_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.end_after(_HEAD_S if self.transport.is_closing() else None)


class HttpConnection(_LimitedConnection, HttpToolsProtocol):
    """An HTTP connection, which ends if its handshake or headers do not arrive in time, or if headers are too large.

    If a new connection exceeds a limit, a connection that is kept alive without a request ends instead.
    """

    _is_idle = False
    """Whether no request is being served."""
    _has_begun = False
    """Whether a part of the next headers has arrived."""
    _head_bytes = 0
    _body_bytes = _chunks = 0
    _early = b""
    """The data that has arrived before the TLS handshake, or together with its end."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        peer, tls = get_remote_addr(transport), self.app_state["tls"]
        host = name_of_host("" if peer is None else peer[0])
        while not self.app_state["limits"].connections.hold(host, 1):
            if not self._evict(host):
                transport.abort()
                return
        self.host = host
        if tls is None:
            self._begin(transport, transport)
        else:
            # The server of asyncio would report a connection only after its handshake.
            kept_in(self.tasks, self.loop.create_task(self._start_tls(transport, tls)))

    def _evict(self, host: str) -> bool:
        """Ends the connection that has waited longest for another request. Returns False if there is none.

        It is one of the same host, or one of another host that has waited for 10 s.
        """
        waiting: dict[HttpConnection, float] = self.app_state["waiting"]
        for each, since_s in waiting.items():
            if each.host == host or self.loop.time() - since_s > _HEAD_S:
                del waiting[each]
                each.release()
                each.transport.abort()
                return True
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.app_state["waiting"].pop(self, None)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._is_idle:
            self._wait_for_head()

    def _begin(self, transport: asyncio.Transport, tcp: asyncio.Transport) -> None:
        super().connection_made(cast("asyncio.Transport", _Transport(transport, tcp)))
        self._wait_for_head()

    async def _start_tls(self, transport: asyncio.Transport, tls: SSLContext) -> None:
        starting = asyncio.ensure_future(
            self.loop.start_tls(
                transport, self, tls, server_side=True, ssl_handshake_timeout=_HEAD_S, ssl_shutdown_timeout=_HEAD_S
            )
        )
        # Then the transport has the protocol of TLS, which has not begun to read. Data that has arrived before is here.
        await asyncio.sleep(0)
        early, self._early = self._early, b""
        if early and not transport.is_closing():
            protocol = cast("asyncio.BufferedProtocol", transport.get_protocol())
            for begin in range(0, len(early), _SLICE_BYTES):
                part = early[begin : begin + _SLICE_BYTES]
                memoryview(protocol.get_buffer(len(part)))[: len(part)] = part
                protocol.buffer_updated(len(part))
        try:
            secured = await starting
        except (OSError, RuntimeError):
            secured = None
        if secured is None or secured.is_closing():
            self.connection_lost(None)
        else:
            self._begin(secured, transport)
            early, self._early = self._early, b""
            self.data_received(early)

    def data_received(self, data: bytes) -> None:
        if self.scheme is None:
            self._early += data
            return
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers exceed {_MAX_HEAD_BYTES} bytes.")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._has_begun = True
        if self.app_state["waiting"].pop(self, None) is not None:
            self.end_after(_HEAD_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > _MAX_HEADERS:
            raise ValueError("too many headers")

    def on_headers_complete(self) -> None:
        # The end of the connection, and its buffers, would reach the newest request alone.
        if not getattr(self.cycle, "response_complete", True):
            raise ValueError("a request before the end of the last answer")
        self._head_bytes = self._body_bytes = self._chunks = 0
        self._is_idle = self._has_begun = False
        self.end_after(None)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        self._body_bytes, self._chunks = self._body_bytes + len(body), self._chunks + 1
        if self._chunks > _MAX_SMALL_CHUNKS + self._body_bytes // _MIN_CHUNK_BYTES:
            raise ValueError("too many small chunks")
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        # A rejected body, which was not read, does not count any longer.
        self.cycle.body = bytearray()
        self._wait_for_head()

    def handle_websocket_upgrade(self) -> None:
        self.end_after(None)
        super().handle_websocket_upgrade()
        websocket = self.transport.get_protocol()
        assert isinstance(websocket, WebSocketConnection), "uvicorn has replaced the protocol"
        websocket.host, self.host = self.host, None

    def _wait_for_head(self) -> None:
        self._is_idle = True
        # The rest of a body that was not read must arrive in time, too.
        has_rest = self._has_begun or getattr(self.cycle, "more_body", True)
        if self.flow.write_paused:
            self.end_after(_STALLED_S)
        elif has_rest or self.transport.is_closing() or self.transport.get_write_buffer_size():
            self.end_after(_HEAD_S)
        else:
            self.end_after(self.timeout_keep_alive)
            self.app_state["waiting"][self] = self.loop.time()

    def _continue_after(self, seconds: float) -> None:
        if self._is_idle:
            self._wait_for_head()
        else:
            super()._continue_after(seconds)


class WebSocketConnection(_LimitedConnection, WebSocketsSansIOProtocol):
    """A WebSocket, which ends if its peer pings without reading, or sends too much.

    The peer may send nothing before it is accepted, a limited number of frames and of fragments of a message, and
    messages within its share of the memory. A message must arrive in the time that a body has.
    """

    _frames = 0
    _sender: Sender | None = None
    """The sender of messages. None before the WebSocket is accepted."""
    _unfinished_bytes = 0
    """The size of the part of a message that has arrived, if it has not arrived completely."""
    _since_s = 0.0
    """The time from which the rest of a message is waited for."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        # `_Transport` ends the connection of its protocol, which would still be the one for HTTP.
        transport.set_protocol(self)
        super().connection_made(transport)
        self._began_s = asyncio.get_running_loop().time()
        # The parser may reject headers that the parser of HTTP has accepted, and then does nothing.
        self.end_after(_HEAD_S)

    def handle_connect(self, event: Request) -> None:
        self.end_after(None)
        super().handle_connect(event)

    def data_received(self, data: bytes) -> None:
        sender = self._sender
        if self.handshake_initiated and not (sender and sender.hold(sender.held_bytes + len(data))):
            self.transport.abort()
            return
        for begin in range(0, len(data), _SLICE_BYTES):
            frames, part = self._frames, data[begin : begin + _SLICE_BYTES]
            super().data_received(part)
            if not self._unfinished_bytes:
                self._since_s = self.loop.time()
            self._unfinished_bytes += len(part)
            if self._frames > frames and not self.frames:
                self._unfinished_bytes = 0
            if len(self.frames) > _MAX_FRAGMENTS or self.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
                self.transport.abort()
            if self.transport.is_closing():
                break

    async def receive(self) -> ASGIReceiveEvent:
        self._sender = sender = cast("Sender", cast("dict[str, Any]", self.scope)["sender"])
        # The application has handled the messages before.
        if self.queue.empty():
            sender.hold(self._unfinished_bytes)
        message = await super().receive()
        self._since_s = self.loop.time()
        return message

    def send_keepalive_ping(self) -> None:
        super().send_keepalive_ping()
        until_s = self._since_s + limits.BODY_S + self._unfinished_bytes / limits.BODY_BYTES_PER_S
        if self._unfinished_bytes and not self.read_paused and self.loop.time() > until_s:
            self.transport.abort()

    def keepalive_timeout(self) -> None:
        # A peer cannot answer a ping within a frame.
        if self._unfinished_bytes:
            self.pong_timer = None
            self.schedule_ping()
        else:
            super().keepalive_timeout()

    def handle_events(self) -> None:
        self._frames += len(self.conn.events)
        open_s = asyncio.get_running_loop().time() - self._began_s
        if self._frames > _MAX_FRAMES + _MAX_FRAMES_A_SECOND * open_s:
            self.transport.abort()
        else:
            super().handle_events()
