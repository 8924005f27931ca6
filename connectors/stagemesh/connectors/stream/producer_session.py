"""The producer side of one stream. Sends the messages of the stream's outlets in turn and receives the replies."""

import asyncio
from collections import deque
from collections.abc import Callable

from google.protobuf.message import DecodeError

from stagemesh.common.errors import InvalidChunkError, StagemeshError, UnavailableError
from stagemesh.connectors.edge import ReadyQueue
from stagemesh.connectors.flow.outlet_attempt import OutletAttempt
from stagemesh.rpc.message_streams import MessageStream
from stagemesh.v1 import stage_pb2

_HANDSHAKE_S = 5.0
_CLOSING_S = 1.0
_MESSAGE_BYTES = 256 << 10
_QUANTUM_BYTES = 64 << 10


class ProducerSession:
    """Sends messages to one consumer and passes the consumer's replies to `take_reply`.

    A message combines the items that several outlets have made ready in one iteration of the event loop.
    """

    def __init__(self, consumer: str, take_reply: Callable[[stage_pb2.PutReply], None]) -> None:
        self._consumer = consumer
        self._take_reply = take_reply
        loop = asyncio.get_running_loop()
        self._stream: MessageStream | None = None
        self._items: deque[stage_pb2.PutItem] = deque()
        self.ready = ReadyQueue[OutletAttempt](self._pull)
        """The outlet attempts that have messages to send."""
        self._welcome: asyncio.Future[stage_pb2.Welcome] = loop.create_future()
        self.ended: asyncio.Future[StagemeshError] = loop.create_future()
        """Completes when the stream has ended. Its result is the error that ended the stream."""

    async def connect(self, stream: MessageStream, hello: stage_pb2.Hello) -> stage_pb2.Welcome:
        """Sends Hello over `stream` and returns the consumer's Welcome.

        Raises the error if the consumer rejects the stream, and UnavailableError if it does not answer in time.
        """
        self._stream = stream
        stream.write(stage_pb2.PutChunkRequest(hello=hello).SerializeToString())
        await asyncio.wait((self._welcome, self.ended), return_when=asyncio.FIRST_COMPLETED, timeout=_HANDSHAKE_S)
        if self.ended.done():
            raise self.ended.result()
        if not self._welcome.done():
            raise UnavailableError(f"replica {self._consumer} did not answer within {_HANDSHAKE_S:g} s")
        return self._welcome.result()

    async def close(self) -> None:
        """Ends the stream. Idempotent."""
        self.ready.take_all()
        self._items.clear()
        if self._stream is not None:
            self._stream.close()
            await asyncio.wait((self.ended,), timeout=_CLOSING_S)

    def send(self, item: stage_pb2.PutItem) -> None:
        """Queues an item, which is sent before any item of an outlet."""
        self._items.append(item)
        self.ready.wake()

    # -- StreamHandler

    def received(self, data: bytes) -> None:
        """Passes the replies in a message to `take_reply`, and completes `connect` when Welcome arrives.

        Raises InvalidChunkError if the message cannot be parsed.
        """
        try:
            response = stage_pb2.PutChunkResponse.FromString(data)
        except DecodeError as exc:
            raise InvalidChunkError("the consumer sent a message that is not a PutChunkResponse") from exc
        if response.HasField("welcome") and not self._welcome.done():
            self._welcome.set_result(response.welcome)
        for reply in response.replies:
            self._take_reply(reply)

    def writable(self) -> None:
        """Sends the waiting messages, because the stream can send data again."""
        self._pull()

    def closed(self, error: StagemeshError | None) -> None:
        """Ends the session. `error` is the cause, or None if the consumer ended the stream normally."""
        self._stream = None
        self.ready.take_all()
        if not self.ended.done():
            self.ended.set_result(error or UnavailableError(f"replica {self._consumer} ended the stream"))

    # -- inner workings

    def _pull(self) -> None:
        while self._stream is not None and self._stream.is_writable and (data := self._next_message()):
            self._stream.write(data)

    def _next_message(self) -> bytes:
        """Returns the next message, or b"" if there is nothing to send.

        Each outlet adds about one quantum of items to a message, so that no outlet waits long for a large chunk.
        """
        request = stage_pb2.PutChunkRequest(items=self._items)
        self._items.clear()
        budget_bytes = _MESSAGE_BYTES
        while budget_bytes > 0 and (outlet := self.ready.first()) is not None:
            fragment = b""
            if outlet.has_messages:
                if not outlet.sends_fragments:
                    budget_bytes -= outlet.fill(request, _QUANTUM_BYTES)
                elif request.items:
                    # A fragment must be the first item of its message.
                    break
                else:
                    fragment = outlet.take_fragment()
            if outlet.has_messages:
                self.ready.rotate(outlet)
            else:
                self.ready.discard(outlet)
            if fragment:
                return fragment
        return request.SerializeToString()
