"""The chunker, which cuts the packets of a flow into chunks according to a policy."""

import sys
from collections.abc import Mapping

import numpy as np

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.wire.chunk_sizes import FramesPolicy, WholePolicy
from stagemesh.common.wire.tensors import Array
from stagemesh.connectors.packets import CONTEXT, TOKEN_START, MetadataValue, Packet


class Chunker:
    """A chunker for the packets of one flow. Retains rows until they fill a chunk of the policy."""

    def __init__(self, policy: FramesPolicy | WholePolicy) -> None:
        # No number of rows completes a chunk of a WholePolicy before the flow ends.
        self._policy = policy if isinstance(policy, FramesPolicy) else FramesPolicy(frames=sys.maxsize)
        self._sizes = self._policy.sizes
        self._waiting: list[Packet] = []
        self._waiting_frames = 0
        self._context: dict[str, Array] = {}

    def push(self, packet: Packet) -> list[Packet]:
        """Adds a packet. Returns the chunks that are now complete, or an empty list if no chunk is complete.

        Raises InvalidChunkError if the packet's tensors have different lengths along their first axis, if their names
        differ from the names of earlier tensors, or if the packet has tickets.
        """
        if packet.tickets:
            raise InvalidChunkError(
                f"tickets ({', '.join(packet.tickets)}) cannot be cut into chunks; remove the edge's `chunk`"
            )
        frames = _frames(packet)
        self._waiting.append(packet)
        self._waiting_frames += frames
        self._sizes.add(frames)
        chunks: list[Packet] = []
        while size := self._sizes.next_size(self._waiting_frames):
            joined = _join(self._waiting)
            chunks.append(self._with_context(_slice(joined, 0, size)))
            self._waiting_frames -= size
            self._waiting = [_slice(joined, size, size + self._waiting_frames)] if self._waiting_frames else []
        return chunks

    @property
    def due_s(self) -> float | None:
        """The time on the monotonic clock at which `cut` must be called, or None if the retained rows can wait.

        It holds until the next packet.
        """
        return self._sizes.due_s(self._waiting_frames)

    def cut(self) -> list[Packet]:
        """Returns a list with a chunk of the retained rows, although they are too few for the policy."""
        self._sizes.cut(self._waiting_frames)
        return self.finish()

    def finish(self) -> list[Packet]:
        """Returns a list with the flow's last chunk, which contains the retained rows.

        Returns [] if no rows are retained.
        """
        if not self._waiting_frames:
            return []
        joined = _join(self._waiting)
        self._waiting, self._waiting_frames = [], 0
        return [self._with_context(joined)]

    def _with_context(self, chunk: Packet) -> Packet:
        if not self._policy.left_context_frames:
            return chunk
        context = len(next(iter(self._context.values()))) if self._context else 0
        tensors = {
            name: np.concatenate([self._context[name], tensor]) if context else tensor
            for name, tensor in chunk.tensors.items()
        }
        self._context = {name: tensor[-self._policy.left_context_frames :] for name, tensor in tensors.items()}
        metadata: Mapping[str, MetadataValue] = {**_moved(chunk.metadata, -context), CONTEXT: context}
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
    if TOKEN_START in packets[0].metadata:
        metadata[TOKEN_START] = packets[0].metadata[TOKEN_START]
    return Packet(tensors, metadata)


def _slice(packet: Packet, start: int, end: int) -> Packet:
    tensors = {name: tensor[start:end] for name, tensor in packet.tensors.items()}
    return Packet(tensors, _moved(packet.metadata, start))


def _moved(metadata: Mapping[str, MetadataValue], rows: int) -> Mapping[str, MetadataValue]:
    """Returns the metadata of a packet that begins this number of rows later."""
    token = metadata.get(TOKEN_START)
    return {**metadata, TOKEN_START: token + rows} if isinstance(token, int) and rows else metadata
