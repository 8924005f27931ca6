"""Replays the chunks that a producer has retained. The results are GetChunk responses."""

from collections.abc import AsyncGenerator, Iterator

from stagemesh.common.errors import NotReadyError
from stagemesh.connectors import fragments, wire
from stagemesh.connectors.flow.outlet_attempt import OutletAttempt, Phase
from stagemesh.connectors.flow.sent_chunks import SentChunk, SentChunks
from stagemesh.connectors.packets import EdgeKey, Packet
from stagemesh.v1 import chunk_pb2, stage_pb2


async def replay(flow: OutletAttempt, *, first_seq: int) -> AsyncGenerator[stage_pb2.GetChunkResponse]:
    """Yields the chunks of a flow from number `first_seq` to the end of the flow.

    Waits for chunks that have not been produced yet. Raises NotReadyError (CHUNK_GONE) if a chunk is no longer
    retained.
    """
    chunks: SentChunks = flow.chunks
    seq = first_seq
    while True:
        kept = chunks.retained_from(seq)
        if kept is None:
            raise NotReadyError(f"chunk {seq} of edge {flow.key.edge} is no longer kept", reason="CHUNK_GONE")
        for sent in kept[:1]:
            for response in _chunk_messages(flow.key, sent):
                yield response
            seq = sent.seq + 1
        if not kept:
            if chunks.ended or flow.phase is Phase.FAILED:
                return
            await chunks.changed.wait()


async def replay_packet(key: EdgeKey, packet: Packet) -> AsyncGenerator[stage_pb2.GetChunkResponse]:
    """Yields the GetChunk responses for a packet that does not belong to a flow.

    The responses are the same as for a flow with the key `key` that consists of this packet and an End message.
    """
    shape, digest = wire.shape_of(packet, last=None), wire.FlowDigest()
    digest.add(shape)
    chunk = SentChunk(0, shape=shape, tensors=packet.tensors, metadata=packet.metadata)
    for sent in (chunk, SentChunk(1, tail=digest.end())):
        for response in _chunk_messages(key, sent):
            yield response


def _chunk_messages(key: EdgeKey, sent: SentChunk) -> Iterator[stage_pb2.GetChunkResponse]:
    transfer_id = sent.seq + 1
    wire_key, tensors, shape, regions = wire.key_to_wire(key), sent.tensors, sent.shape, sent.regions
    chunk = chunk_pb2.Chunk(key=wire_key, seq=sent.seq)
    if shape is None or tensors is None:
        assert sent.tail is not None, "a chunk has data or a tail"
        wire.fill_tail(chunk, sent.tail)
        yield stage_pb2.GetChunkResponse(chunk=chunk)
        return
    wire.fill_metadata(chunk.data, sent.metadata or {})
    if shape.size_bytes <= fragments.FRAGMENT_BYTES:
        wire.fill_inline(chunk.data, tensors, shape)
        wire.add_tickets(chunk.data, sent.tickets or {}, lease_id=0)
        yield stage_pb2.GetChunkResponse(chunk=chunk)
        return
    for region in regions:
        region.retain()
    try:
        for message, payload in fragments.split_into_fragments(
            wire_key, tensors, total_bytes=shape.size_bytes, transfer_id=transfer_id
        ):
            message.payload = bytes(payload)
            yield stage_pb2.GetChunkResponse(fragment=message)
        wire.fill_streamed(chunk.data, shape, transfer_id=transfer_id)
        yield stage_pb2.GetChunkResponse(chunk=chunk)
    finally:
        for region in regions:
            region.release()
