"""Listens to the audio of an open turn: the request that finds the begin and the end of speech in it."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import NamedTuple

from stagemesh.common.errors import CancelledRequestError
from stagemesh.common.tensors import read_inline
from stagemesh.connectors.edge import Packet
from stagemesh.orchestrator.request.streamed_input import StreamedInput
from stagemesh.orchestrator.session.answer import RunningRequest
from stagemesh.v1 import orchestrator_pb2


class Speech(NamedTuple):
    """The begin or the end of speech. `at_s` is its time in the audio of the session, in seconds."""

    begins: bool
    at_s: float


class Listener:
    """A request that finds speech in audio which is streamed into it.

    `begins_s` is the time in the audio of the session at which the streamed audio begins, in seconds.
    """

    def __init__(self, request: RunningRequest, stream: StreamedInput, *, begins_s: float) -> None:
        self._request, self._stream, self._begins_s = request, stream, begins_s

    @property
    def size_bytes(self) -> int:
        """The number of bytes of audio that the listener retains, in case a stage restarts."""
        return self._stream.size_bytes

    def hear(self, packets: Sequence[Packet]) -> None:
        """Streams further audio into the request."""
        for packet in packets:
            self._stream.append(packet)

    async def events(self) -> AsyncGenerator[Speech]:
        """Yields the begins and the ends of speech. Raises the error of a failed request. Iterate within `aclosing`."""
        record = self._request.record
        record.expect(linger_s=0)
        async with aclosing(record.follow(next_positions={})) as events:
            async for event in events:
                output = orchestrator_pb2.GenerateResponse.FromString(event).output
                if output.HasField("tensor"):
                    for begins, at_s in read_inline(output.tensor).tolist():
                        yield Speech(bool(begins), self._begins_s + at_s)

    def stop(self) -> None:
        """Stops the request."""
        self._request.stop(CancelledRequestError("the session does not listen any longer"))
