"""The connections of callers, with limits of time and size that hold before a request is known."""

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request

_HEAD_S = 10
"""The time for the headers of a request after the connection, its TLS handshake or the last answer, in seconds."""
_STALLED_S = 60
"""The time within which a peer reads a part of an answer, in seconds."""
_MAX_HEADERS = 128
_MAX_HEAD_BYTES = 64 << 10
"""The limit for bytes that are neither complete headers nor a part of a body. The parser would collect any number."""
_MAX_PIPELINED = 16
_MIN_CHUNK_BYTES, _MAX_SMALL_CHUNKS = 64, 1000
"""A body may have this number of chunks that are smaller."""
_MAX_FRAGMENTS = 1024
_MAX_FRAMES, _MAX_FRAMES_A_SECOND = 10_000, 500
_SLICE_BYTES = 4096
_MAX_UNREAD_BYTES = 32 << 20


class _TimedConnection(asyncio.Protocol):
    """A connection that ends if its peer does not read in time."""

    transport: asyncio.Transport
    _timer: asyncio.TimerHandle | None = None
    _is_idle = False
    """Whether the connection waits for the next request."""

    def end_after(self, seconds: float | None) -> None:
        """Ends the connection after a time, even if its peer does not read. Replaces the last time. None for never."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None if seconds is None else asyncio.get_running_loop().call_later(seconds, self.transport.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.end_after(None)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.end_after(_STALLED_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self.end_after(_HEAD_S if self._is_idle else None)


class HttpConnection(_TimedConnection, HttpToolsProtocol):
    """An HTTP connection, which ends if headers do not arrive in time, or are too large."""

    _head_bytes = 0
    _body_bytes = _chunks = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait_for_head()
        if self.limit_concurrency is not None and len(self.connections) >= self.limit_concurrency:
            transport.abort()

    def data_received(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes > _MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response(f"The headers exceed {_MAX_HEAD_BYTES} bytes.")
        if self.transport.is_closing():
            self.end_after(_HEAD_S)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        if len(self.headers) > _MAX_HEADERS:
            raise ValueError("too many headers")

    def on_headers_complete(self) -> None:
        self._head_bytes = self._body_bytes = self._chunks = 0
        self._is_idle = False
        self.end_after(None)
        super().on_headers_complete()
        if len(self.pipeline) > _MAX_PIPELINED:
            raise ValueError("too many requests without an answer")

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        self._body_bytes, self._chunks = self._body_bytes + len(body), self._chunks + 1
        if self._chunks > _MAX_SMALL_CHUNKS + self._body_bytes // _MIN_CHUNK_BYTES:
            raise ValueError("too many small chunks")
        super().on_body(body)

    def on_response_complete(self) -> None:
        is_last = not self.pipeline or self.transport.is_closing()
        super().on_response_complete()
        if is_last:
            self._wait_for_head()

    def handle_websocket_upgrade(self) -> None:
        self.end_after(None)
        super().handle_websocket_upgrade()

    def _wait_for_head(self) -> None:
        self._is_idle = True
        self.end_after(_STALLED_S if self.flow.write_paused else _HEAD_S)


class WebSocketConnection(_TimedConnection, WebSocketsSansIOProtocol):
    """A WebSocket, which ends if its peer sends too many frames or fragments of a message, or pings without reading."""

    _frames = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._began_s = asyncio.get_running_loop().time()
        # The parser may reject headers that the parser of HTTP has accepted, and then does nothing.
        self.end_after(_HEAD_S)

    def handle_connect(self, event: Request) -> None:
        self.end_after(None)
        super().handle_connect(event)

    def data_received(self, data: bytes) -> None:
        for begin in range(0, len(data), _SLICE_BYTES):
            super().data_received(data[begin : begin + _SLICE_BYTES])
            if len(self.frames) > _MAX_FRAGMENTS or self.transport.get_write_buffer_size() > _MAX_UNREAD_BYTES:
                self.transport.abort()
            if self.transport.is_closing():
                break

    def handle_events(self) -> None:
        self._frames += len(self.conn.events)
        open_s = asyncio.get_running_loop().time() - self._began_s
        if self._frames > _MAX_FRAMES + _MAX_FRAMES_A_SECOND * open_s:
            self.transport.abort()
        else:
            super().handle_events()
