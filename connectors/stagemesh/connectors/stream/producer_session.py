"""The producing end of one lane: what its flows have ready goes out in turn, and replies come back."""

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from google.protobuf.message import DecodeError

from stagemesh.common.errors import InvalidChunkError, StagemeshError, UnavailableError
from stagemesh.connectors.flow.outlet_attempt import OutletAttempt
from stagemesh.rpc.message_streams import MessageStream
from stagemesh.v1 import stage_pb2

_GREETING_S = 5.0
_CLOSING_S = 1.0
_MESSAGE_BYTES = 256 << 10
_QUANTUM_BYTES = 64 << 10


class ProducerSession:
    """Implements `LaneUser`. One message carries what all flows got ready within one turn of the event loop."""

    def __init__(self, consumer: str, take_reply: Callable[[stage_pb2.PutReply], None]) -> None:
        self._consumer = consumer
        self._take_reply = take_reply
        self._loop = asyncio.get_running_loop()
        self._lane: MessageStream | None = None
        self._items: deque[stage_pb2.PutItem] = deque()
        self._ready: OrderedDict[OutletAttempt, None] = OrderedDict()
        self._pump_is_due = False
        self._welcome: asyncio.Future[stage_pb2.Welcome] = self._loop.create_future()
        self._ended: asyncio.Future[StagemeshError] = self._loop.create_future()

    async def greet(self, lane: MessageStream, hello: stage_pb2.Hello) -> stage_pb2.Welcome:
        """Begins the stream; raises what the consumer refused it with."""
        self._lane = lane
        lane.write(stage_pb2.PutChunkRequest(hello=hello).SerializeToString())
        await asyncio.wait((self._welcome, self._ended), return_when=asyncio.FIRST_COMPLETED, timeout=_GREETING_S)
        if self._ended.done():
            raise self._ended.result()
        if not self._welcome.done():
            raise UnavailableError(f"replica {self._consumer} did not answer within {_GREETING_S:g} s")
        return self._welcome.result()

    async def ended(self) -> StagemeshError:
        """Why the stream is over, once it is."""
        return await asyncio.shield(self._ended)

    async def close(self) -> None:
        """Ends the stream. Closing twice is harmless."""
        self._ready.clear()
        self._items.clear()
        if self._lane is not None:
            self._lane.close()
            await asyncio.wait((self._ended,), timeout=_CLOSING_S)

    # -- sending

    def send(self, item: stage_pb2.PutItem) -> None:
        """Sends an item before whatever the flows have."""
        self._items.append(item)
        self._pump_soon()

    def ready(self, flow: OutletAttempt) -> None:
        """The flow has something to send."""
        self._ready[flow] = None
        self._pump_soon()

    def forget(self, flow: OutletAttempt) -> None:
        """The flow is over, or goes on elsewhere."""
        self._ready.pop(flow, None)

    # -- for the lane

    def received(self, data: bytes) -> None:
        """See `LaneUser`."""
        try:
            response = stage_pb2.PutChunkResponse.FromString(data)
        except DecodeError as exc:
            raise InvalidChunkError(f"replica {self._consumer} sent what is no reply") from exc
        if response.HasField("welcome") and not self._welcome.done():
            self._welcome.set_result(response.welcome)
        for reply in response.replies:
            self._take_reply(reply)

    def writable(self) -> None:
        """See `LaneUser`."""
        self._pump()

    def closed(self, error: StagemeshError | None) -> None:
        """See `LaneUser`."""
        if not self._ended.done():
            self._ended.set_result(error or UnavailableError(f"replica {self._consumer} ended the stream"))

    # -- inner workings

    def _pump_soon(self) -> None:
        if not self._pump_is_due:
            self._pump_is_due = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        self._pump_is_due = False
        while self._lane is not None and self._lane.is_writable and (data := self._next_message()):
            self._lane.write(data)

    def _next_message(self) -> bytes:
        """A quantum from each flow in turn, so that none waits behind a large chunk; empty where nothing is ready."""
        request = stage_pb2.PutChunkRequest(items=self._items)
        self._items.clear()
        budget_bytes = _MESSAGE_BYTES
        while self._ready and budget_bytes > 0:
            flow, _ = self._ready.popitem(last=False)
            if not flow.has_items:
                continue
            if flow.in_pieces and request.items:
                self._ready[flow] = None
                self._ready.move_to_end(flow, last=False)
                break
            data = flow.take_piece() if flow.in_pieces else b""
            budget_bytes -= 0 if data else flow.fill(request, _QUANTUM_BYTES)
            if flow.has_items:
                self._ready[flow] = None
            if data:
                return data
        return request.SerializeToString()
