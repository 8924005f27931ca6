"""Cuts the packets of a flow into chunks according to the edge's chunk policy."""

from collections.abc import Mapping

import numpy as np

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import ChunkPolicy, FramesPolicy, MetadataValue, Packet, StepPolicy


class Chunker:
    """Applies a chunk policy to the packets of one flow. Retains rows until they fill a chunk."""

    def __init__(self, policy: ChunkPolicy) -> None:
        self._policy = policy
        self._waiting: list[Packet] = []
        self._waiting_frames = 0
        self._context: dict[str, Array] = {}
        self._first = True

    def push(self, packet: Packet) -> list[Packet]:
        """Adds a packet and returns the chunks that it completes.

        Raises InvalidChunkError if the policy cuts or joins packets and the packet's tensors have unequal lengths or do
        not match the tensors of earlier packets.
        """
        if isinstance(self._policy, StepPolicy):
            return [packet]
        frames = _frames(packet)
        self._waiting.append(packet)
        self._waiting_frames += frames
        if not isinstance(self._policy, FramesPolicy):
            return []
        return self._cut(self._policy)

    def finish(self) -> list[Packet]:
        """Returns the last chunk, which contains the remaining rows, or an empty list if no rows remain."""
        if not self._waiting_frames:
            return []
        joined = _join(self._waiting)
        self._waiting, self._waiting_frames = [], 0
        return [self._with_context(self._policy, joined) if isinstance(self._policy, FramesPolicy) else joined]

    def _cut(self, policy: FramesPolicy) -> list[Packet]:
        chunks: list[Packet] = []
        wanted = policy.initial_frames if self._first and policy.initial_frames else policy.frames
        if self._waiting_frames < wanted:
            return chunks
        joined, start, total = _join(self._waiting), 0, self._waiting_frames
        while total - start >= wanted:
            chunks.append(self._with_context(policy, _slice(joined, start, start + wanted)))
            start += wanted
            wanted = policy.frames
        self._first = False
        self._waiting, self._waiting_frames = [_slice(joined, start, total)] if total > start else [], total - start
        return chunks

    def _with_context(self, policy: FramesPolicy, chunk: Packet) -> Packet:
        if not policy.left_context_frames:
            return chunk
        context = len(next(iter(self._context.values()))) if self._context else 0
        tensors = {
            name: np.concatenate([self._context[name], tensor]) if context else tensor
            for name, tensor in chunk.tensors.items()
        }
        self._context = {name: tensor[-policy.left_context_frames :] for name, tensor in tensors.items()}
        metadata: Mapping[str, MetadataValue] = {**chunk.metadata, "context_frames": context}
        return Packet(tensors, metadata)


def _frames(packet: Packet) -> int:
    lengths = {tensor.shape[0] if tensor.ndim else -1 for tensor in packet.tensors.values()}
    if len(lengths) != 1 or -1 in lengths:
        shapes = {name: list(tensor.shape) for name, tensor in packet.tensors.items()}
        raise InvalidChunkError(f"tensors that are cut along their first axis must have equal lengths, not {shapes}")
    return lengths.pop()


def _join(packets: list[Packet]) -> Packet:
    if len(packets) == 1:
        return packets[0]
    names = packets[0].tensors.keys()
    if any(packet.tensors.keys() != names for packet in packets):
        raise InvalidChunkError("packets that are joined into one chunk must have the same tensors")
    tensors = {name: np.concatenate([packet.tensors[name] for packet in packets]) for name in names}
    metadata = {key: value for packet in packets for key, value in packet.metadata.items()}
    return Packet(tensors, metadata)


def _slice(packet: Packet, start: int, end: int) -> Packet:
    return Packet({name: tensor[start:end] for name, tensor in packet.tensors.items()}, packet.metadata)
