"""The input that a client streams into a running request over the edges from "@input".

The orchestrator is the producer of these edges. `StreamedInput` retains the packets until the request has ended, so
a stage that restarts receives all of them again. `packets_of` converts a piece of input to packets. `InputPlanes`
owns the data planes over which the packets are sent.
"""

import secrets
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import asynccontextmanager

import numpy as np

from stagemesh.common.errors import CancelledRequestError, InvalidRequestError, StagemeshError, UnsupportedError
from stagemesh.common.notification import Notifier
from stagemesh.common.plugins.connectors import GRPC
from stagemesh.common.plugins.descriptors import INPUT
from stagemesh.common.requests.request_checks import read_samples
from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow.edge_meters import EdgeMeters
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import EdgeKey, Packet
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.pipeline import Edge
from stagemesh.v1 import request_pb2

SAMPLE_RATE_HZ = "sample_rate_hz"
"""The key of the number of samples per second in the metadata of a packet of audio."""
_PACKET_BYTES = 256 << 10
"""The maximum size of a packet that `packets_of` returns, in bytes. A larger piece of input becomes several packets."""
_MIN_RATE_HZ, _MAX_RATE_HZ = 1_000, 384_000
_MAX_CHARACTER_BYTES = 4
ARENA_BYTES = 8 << 20
"""The memory of a data plane for chunks that no stage has received yet, in bytes."""


class StreamedInput:
    """The packets that a client streams into one request.

    The owner appends packets and ends or aborts the input. The request sends the packets to the stages that edges from
    "@input" feed. When the request has ended, the packets are dropped.
    """

    def __init__(self, on_consumed: Callable[[int], None] = lambda _: None) -> None:
        """Creates an empty input.

        `on_consumed` is called with a number of bytes when all consuming stages have accepted these further bytes.
        Bytes that a restarted stage receives again do not count again. When the request ends, all remaining bytes count
        as consumed, and so do bytes that are appended later.
        """
        self.size_bytes = 0
        """The number of bytes of all packets that were appended."""
        self._on_consumed = on_consumed
        self._packets: list[Packet] = []
        self._accepted: dict[str, int] = {}
        """The number of packets that any attempt of an edge's consumer has accepted, by edge name."""
        self._consumed = 0
        """The number of packets that the consumers of all edges have accepted."""
        self._outlets: set[Outlet] = set()
        self._has_ended = self._is_closed = False
        self._error: StagemeshError | None = None
        self._changed = Notifier()

    # -- for the owner

    def append(self, packet: Packet) -> None:
        """Appends a packet, which is sent when the consuming stages grant credit. Do not call this after `end`."""
        assert not self._has_ended, "the input has ended"
        self.size_bytes += packet.size_bytes
        if self._is_closed:
            self._on_consumed(packet.size_bytes)
        else:
            self._packets.append(packet)
            self._changed.fire()

    def end(self) -> None:
        """Ends the input. The consuming stages receive the end after the last packet. Idempotent."""
        self._has_ended = True
        self._changed.fire()

    def abort(self, error: StagemeshError) -> None:
        """Ends the input with an error, which the consuming stages receive before packets that lack credit."""
        self._error = self._error or error
        for outlet in list(self._outlets):
            outlet.abort(self._error)
        self._changed.fire()

    # -- for the request

    def begin(self, edges: Iterable[Edge]) -> None:
        """Declares the edges that carry the input. Until then, no byte counts as consumed."""
        for edge in edges:
            self._accepted.setdefault(edge.name, 0)

    async def send(self, outlet: Outlet, edge: Edge) -> None:
        """Sends the packets over one attempt of an edge, from the first one to the end of the input.

        Omits packets without a tensor that the edge transfers. Returns when the consumer has received everything.
        Raises the error that ended the flow, if the flow ends earlier.
        """
        self._outlets.add(outlet)
        try:
            if self._error is not None:
                outlet.abort(self._error)
            position = 0
            while (packet := await self._packet(position)) is not None:
                if packet.tensors.keys() & set(edge.tensors):
                    await outlet.send(packet)
                position += 1
                self._note_accepted(edge, position)
            await outlet.finish()
        finally:
            self._outlets.discard(outlet)

    def close(self) -> None:
        """Drops all packets, because the request has ended. Idempotent."""
        self._is_closed = True
        self._consume(len(self._packets))
        self._packets.clear()
        self._consumed = 0

    # -- inner workings

    async def _packet(self, position: int) -> Packet | None:
        """Returns the packet with this index, or None after the end. Waits until there is one of them."""
        while position >= len(self._packets):
            if self._has_ended or self._error is not None:
                return None
            await self._changed.wait()
        return self._packets[position]

    def _note_accepted(self, edge: Edge, count: int) -> None:
        if count > self._accepted[edge.name]:
            self._accepted[edge.name] = count
            self._consume(min(self._accepted.values()))

    def _consume(self, count: int) -> None:
        size_bytes = sum(packet.size_bytes for packet in self._packets[self._consumed : count])
        self._consumed = count
        if size_bytes:
            self._on_consumed(size_bytes)


def packets_of(part: request_pb2.Part, *, kinds: Collection[str]) -> Sequence[Packet]:
    """Converts a piece of a client's input to packets of at most 256 KiB.

    Text becomes {"text": uint8[bytes]}, each packet with whole characters. Audio becomes {"audio": float32[samples]},
    with the mean of all channels, and the metadata value "sample_rate_hz".

    `kinds` contains the names of the tensors that edges of the request carry (`Route.input_tensors`). Raises
    UnsupportedError if the piece is of another kind. Raises InvalidChunkError or InvalidRequestError (INVALID_MEDIA) if
    its audio is invalid.
    """
    match part.WhichOneof("content"):
        case "text" if "text" in kinds:
            return _packets_of_text(part.text)
        case "audio" if "audio" in kinds:
            return _packets_of_audio(part.audio)
        case kind:
            raise UnsupportedError(
                f"a piece of streamed input is {kind or 'empty'}, but the stages take {' or '.join(sorted(kinds))}; "
                "append only this"
            )


def _packets_of_text(text: str) -> Sequence[Packet]:
    step = _PACKET_BYTES // _MAX_CHARACTER_BYTES
    pieces = (text[start : start + step].encode() for start in range(0, len(text), step))
    return [Packet({"text": np.frombuffer(piece, np.uint8)}) for piece in pieces]


def _packets_of_audio(audio: request_pb2.Audio) -> Sequence[Packet]:
    samples = read_samples(audio)
    problem = ""
    if samples.dtype != np.float32 or samples.ndim not in (1, 2) or 0 in samples.shape[1:]:
        problem = f"the samples are {samples.dtype}{list(samples.shape)}; send float32[samples] or [samples, channels]"
    elif not np.isfinite(samples).all():
        problem = "a sample is not a finite number; send samples from -1 to 1"
    elif not _MIN_RATE_HZ <= audio.sample_rate_hz <= _MAX_RATE_HZ:
        problem = f"sample_rate_hz is {audio.sample_rate_hz}; use {_MIN_RATE_HZ} to {_MAX_RATE_HZ}"
    if problem:
        raise InvalidRequestError(f"a piece of audio is invalid: {problem}", reason="INVALID_MEDIA")
    mono = samples if samples.ndim == 1 else samples.mean(axis=1, dtype=np.float32)
    step = _PACKET_BYTES // mono.itemsize
    metadata = {SAMPLE_RATE_HZ: audio.sample_rate_hz}
    return [Packet({"audio": mono[start : start + step]}, metadata) for start in range(0, len(mono), step)]


class InputPlanes:
    """The data planes of one orchestrator: one for each generation, created at its first flow.

    A stage admits only producers of its own generation.
    """

    def __init__(self, pipeline: str) -> None:
        """Creates no data plane yet. `pipeline` is the pipeline's name."""
        self.producer = f"{INPUT}-{secrets.token_hex(4)}"
        """The name by which stages know this orchestrator as a producer."""
        self.meters = EdgeMeters()
        """The counts of what all data planes have sent."""
        self._pipeline = pipeline
        self._planes: dict[str, DataPlane] = {}
        self._flows = Counter[str]()
        """The number of open flows, by generation."""

    @asynccontextmanager
    async def open_outlet(self, key: EdgeKey, consumer: Replica) -> AsyncGenerator[Outlet]:
        """Opens a flow to `consumer`, which must expect it. Aborts an unfinished flow at the end of the block.

        Raises NotReadyError (NO_MEMORY) if not enough memory is available.
        """
        generation = consumer.generation
        self._flows[generation] += 1
        try:
            plane = self._planes.get(generation) or await self._add(generation)
            outlet = plane.open_outlet(key, consumer.address, connector=GRPC, policy=StepPolicy())
            try:
                yield outlet
            finally:
                outlet.abort(CancelledRequestError("the request stopped before the end of its input"))
        finally:
            self._flows[generation] -= 1

    async def close(self) -> None:
        """Closes all data planes. Idempotent."""
        while self._planes:
            _, plane = self._planes.popitem()
            await plane.close()

    async def _add(self, generation: str) -> DataPlane:
        """Creates the data plane of a generation. Closes those of other generations without flows."""
        plane = self._planes[generation] = DataPlane(
            replica=self.producer,
            pipeline=self._pipeline,
            generation=generation,
            arena_bytes=ARENA_BYTES,
            shared_arena=False,
            meters=self.meters,
        )
        for idle in [name for name in self._planes if not self._flows[name]]:
            await self._planes.pop(idle).close()
        return plane
