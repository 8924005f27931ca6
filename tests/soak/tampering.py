"""A relay in front of the orchestrator that tampers with responses, like a faulty orchestrator."""

from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from enum import Enum

import grpc

from stagemesh.common.requests.output_position import length_of
from stagemesh.rpc.channels import SERVER_OPTIONS, open_channel
from stagemesh.v1 import orchestrator_pb2
from tests.soak.soak import Through

_GENERATE = "/stagemesh.v1.OrchestratorService/Generate"


class Tampering(Enum):
    """The way in which one piece of one output of every request is changed."""

    NOTHING = "nothing"
    DUPLICATE = "duplicate"
    LOSE = "lose"
    SWAP = "swap"
    ALTER = "alter"
    END_EARLY = "end early"
    FAIL = "fail"


def tampered(tampering: Tampering, *, output: str, piece: int = 3) -> Through:
    """Returns a relay for the parameter `through` of `soak`. A piece is the content of one message."""

    @asynccontextmanager
    async def through(endpoint: str) -> AsyncIterator[str]:
        async with open_channel(endpoint) as channel:
            server = grpc.aio.server(options=SERVER_OPTIONS)
            server.add_generic_rpc_handlers((_Relay(channel, lambda: _Tamperer(tampering, output, piece)),))
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            try:
                yield f"127.0.0.1:{port}"
            finally:
                await server.stop(None)

    return through


class _Tamperer:
    """Tampers with the messages of one call."""

    def __init__(self, tampering: Tampering, output: str, piece: int) -> None:
        self._tampering, self._output, self._piece = tampering, output, piece
        self._seen = 0
        self._held: list[bytes] = []
        self._positions = Counter[str]()

    def relay(self, message: bytes) -> list[bytes]:
        """Returns the messages to send instead. Raises EOFError if the stream must end, and ConnectionError if it must
        fail.

        The positions are those of an undisturbed output. Otherwise, a client would drop or reject the messages.
        """
        return [self._place(each) for each in self._changed(message)]

    def _place(self, message: bytes) -> bytes:
        response = orchestrator_pb2.GenerateResponse.FromString(message)
        if not response.HasField("output"):
            return message
        output = response.output
        output.position = self._positions[output.name]
        self._positions[output.name] += length_of(output)
        return response.SerializeToString()

    def _changed(self, message: bytes) -> list[bytes]:
        response = orchestrator_pb2.GenerateResponse.FromString(message)
        if response.output.name != self._output:
            return [message]
        self._seen += 1
        if self._seen == self._piece + 1 and self._held:
            return [message, self._held.pop()]
        return self._tamper(message, response) if self._seen == self._piece else [message]

    def _tamper(self, message: bytes, response: orchestrator_pb2.GenerateResponse) -> list[bytes]:
        match self._tampering:
            case Tampering.DUPLICATE:
                return [message, message]
            case Tampering.LOSE:
                return []
            case Tampering.SWAP:
                self._held.append(message)
                return []
            case Tampering.ALTER:
                response.output.text = response.output.text[:-1].swapcase() + response.output.text[-1:]
                return [response.SerializeToString()]
            case Tampering.END_EARLY:
                raise EOFError
            case Tampering.FAIL:
                raise ConnectionError
            case _:
                return [message]


class _Relay(grpc.GenericRpcHandler):
    def __init__(self, channel: grpc.aio.Channel, hand: Callable[[], _Tamperer]) -> None:
        self._channel, self._hand = channel, hand

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        if handler_call_details.method != _GENERATE:
            return None
        return grpc.unary_stream_rpc_method_handler(self._serve)

    async def _serve(self, request: bytes, context: "grpc.aio.ServicerContext[bytes, bytes]") -> AsyncIterator[bytes]:
        hand = self._hand()
        method: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = self._channel.unary_stream(_GENERATE)
        call = method(request)
        try:
            async for message in call:
                for each in hand.relay(message):
                    yield each
        except EOFError:
            return
        except ConnectionError:
            # Not a status that clients treat as a broken connection: they would call again.
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "it was made to fail")
        finally:
            call.cancel()
