"""A relay before a replica: forwards its PutChunk streams message by message, with the faults that a test sets.

Everything else that a replica serves passes through as it is.
"""

import asyncio
import itertools
import os
from collections import defaultdict
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress

import grpc

from stagemesh.rpc.channels import SERVER_OPTIONS, open_channel
from stagemesh.v1 import stage_pb2
from tests.connectors.hosts import serving
from tests.connectors.local_sockets import LocalSocket, connect, listen
from tests.connectors.relay_faults import CutError, Direction, Faults, pump

PUT_CHUNK = "/stagemesh.v1.StageService/PutChunk"
_numbers = itertools.count()


class Relay(grpc.GenericRpcHandler):
    """A relay before one replica; `faults` has the fault of each producer by its name."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.endpoint = ""
        self.faults: defaultdict[str, Faults] = defaultdict(Faults)
        self.local_streams = 0
        self.false_socket = ""
        """The socket name that producers receive in place of one that leads to their consumer."""
        self._channel = channel
        self._tasks: set[asyncio.Task[None]] = set()

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes]":
        """Handles every method as a stream of bytes in both directions."""
        method = handler_call_details.method

        async def serve(
            requests: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[bytes, bytes]"
        ) -> AsyncIterator[bytes]:
            call: grpc.aio.StreamStreamCall[bytes, bytes] = self._channel.stream_stream(method)()
            replies = self._put(requests, call) if method == PUT_CHUNK else _through(requests, call)
            try:
                async for reply in replies:
                    yield reply
            except CutError:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "cut")
            except grpc.aio.AioRpcError as exc:
                await context.abort(exc.code(), exc.details() or "", tuple(exc.trailing_metadata() or ()))
            finally:
                call.cancel()

        return grpc.stream_stream_rpc_method_handler(serve)

    async def close(self) -> None:
        """Ends the local streams. Closing twice is harmless."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _put(
        self, requests: AsyncIterator[bytes], call: "grpc.aio.StreamStreamCall[bytes, bytes]"
    ) -> AsyncIterator[bytes]:
        first = await anext(requests, None)
        if first is None:
            return
        faults = self.faults[stage_pb2.PutChunkRequest.FromString(first).hello.replica]
        replies: asyncio.Queue[bytes] = asyncio.Queue()

        async def send_requests() -> None:
            await pump(_chain(first, requests), call.write, faults=faults, direction=Direction.REQUESTS)
            await call.done_writing()
            await asyncio.Event().wait()

        async def send_replies() -> None:
            await pump(self._rewritten(aiter(call), faults), replies.put, faults=faults, direction=Direction.REPLIES)

        async for reply in _until_first(
            replies, asyncio.create_task(send_requests()), asyncio.create_task(send_replies())
        ):
            yield reply

    async def _rewritten(self, replies: AsyncIterator[bytes], faults: Faults) -> AsyncIterator[bytes]:
        """Yields the replies. The name of the consumer's local socket is replaced by the name of the relay's own."""
        async for message in replies:
            response = stage_pb2.PutChunkResponse.FromString(message)
            if response.welcome.local_socket:
                name = self.false_socket or self._listen_for(response.welcome.local_socket, faults)
                response.welcome.local_socket = name
            yield response.SerializeToString()

    def _listen_for(self, target: str, faults: Faults) -> str:
        name = f"stagemesh-relay-{os.getpid()}-{next(_numbers)}"
        self._run(self._accept(listen(name), target, faults))
        return name

    async def _accept(self, listener: LocalSocket, target: str, faults: Faults) -> None:
        with listener:
            while True:
                self._run(self._relay(await listener.accept(), target, faults))

    async def _relay(self, producer: LocalSocket, target: str, faults: Faults) -> None:
        self.local_streams += 1
        with producer, connect(target) as consumer:
            descriptor = await producer.receive_descriptor()
            consumer.send_descriptor(descriptor)
            os.close(descriptor)
            requests = pump(producer.frames(), consumer.write_frame, faults=faults, direction=Direction.REQUESTS)
            # This Welcome also names a local socket. The producer ignores it, because it already has this stream.
            replies = pump(consumer.frames(), producer.write_frame, faults=faults, direction=Direction.REPLIES)
            await _first_of(asyncio.create_task(requests), asyncio.create_task(replies))

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


async def _first_of(*tasks: "asyncio.Task[None]") -> None:
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        with suppress(CutError, OSError):
            for task in done:
                task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_first(queue: "asyncio.Queue[bytes]", *tasks: "asyncio.Task[None]") -> AsyncIterator[bytes]:
    """Yields the entries of the queue until one of the tasks ends; raises the error of that task."""
    getting = asyncio.ensure_future(queue.get())
    try:
        while True:
            await asyncio.wait((getting, *tasks), return_when=asyncio.FIRST_COMPLETED)
            if getting.done():
                yield getting.result()
                getting = asyncio.ensure_future(queue.get())
                continue
            for task in tasks:
                if task.done():
                    task.result()
            return
    finally:
        for pending in (getting, *tasks):
            pending.cancel()
        await asyncio.gather(getting, *tasks, return_exceptions=True)


async def _through(
    requests: AsyncIterator[bytes], call: "grpc.aio.StreamStreamCall[bytes, bytes]"
) -> AsyncIterator[bytes]:
    async for request in requests:
        await call.write(request)
    await call.done_writing()
    async for reply in call:
        yield reply


async def _chain(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    async for message in rest:
        yield message


@asynccontextmanager
async def relayed(endpoint: str) -> AsyncIterator[Relay]:
    """Yields a relay before "host:port". Producers connect to its `endpoint`."""
    async with open_channel(endpoint) as channel:
        relay = Relay(channel)
        async with serving(relay, SERVER_OPTIONS) as relay.endpoint:
            try:
                yield relay
            finally:
                await relay.close()
