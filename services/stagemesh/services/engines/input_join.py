"""Combines the packets of a stage's edges into the inputs of its engine.

One packet from each joined edge makes one input. Each packet of an edge that is apart is an input of its own, in
arrival order, which is not deterministic across edges.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence

import numpy as np

from stagemesh.common.descriptors import Signature
from stagemesh.common.errors import InvalidChunkError, InvalidRequestError
from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import MetadataValue, Packet
from stagemesh.services.engines.base import Task


async def packets_of(task: Task, signature: Signature) -> AsyncGenerator[Packet, None]:
    """Yields the inputs of one request: the client's prompt, or the packets of its edges. Iterate within `aclosing`.

    Raises InvalidChunkError if the edges do not match each other or the stage's signature.
    """
    if not signature.accepts and not task.inlets:
        yield prompt_packet(task)
        return
    if signature.accepts and not task.inlets:
        raise InvalidRequestError(
            f"the stage has no input; it needs an edge that carries {', '.join(signature.accepts)}"
        )
    sources = sources_of(task)
    if len(sources) == 1:
        async for packet in sources[0]:
            yield check_packet(packet, signature)
        return
    merging = merge(sources)
    try:
        async for packet in merging:
            yield check_packet(packet, signature)
    finally:
        await merging.aclose()


def prompt_packet(task: Task) -> Packet:
    """Returns the client's text and tensors as one packet; raises InvalidRequestError if the prompt is not text."""
    if not isinstance(task.prompt, str):
        raise InvalidRequestError("this stage takes its prompt as text, not as a conversation or token ids")
    text: Array = np.frombuffer(task.prompt.encode(), np.uint8)
    return Packet({**task.tensors, "text": text})


def sources_of(task: Task) -> Sequence[AsyncIterator[Packet]]:
    """Returns the sources of inputs: the joined edges as one source, and each edge that is apart."""
    together = {edge: aiter(inlet) for edge, inlet in task.inlets.items() if edge not in task.apart}
    apart = [aiter(inlet) for edge, inlet in task.inlets.items() if edge in task.apart]
    if len(together) == 1:
        return [*together.values(), *apart]
    return [JoinedEdges(together), *apart] if together else apart


class JoinedEdges:
    """Reads several edges as one: a packet of each makes one packet. All edges end after the same number of packets."""

    def __init__(self, readers: Mapping[str, AsyncIterator[Packet]]) -> None:
        self._readers = readers

    def __aiter__(self) -> AsyncIterator[Packet]:
        """Returns itself: flows are read once."""
        return self

    async def __anext__(self) -> Packet:
        """Joins the next packet of each edge; raises InvalidChunkError if only some of the edges have ended."""
        parts = {edge: await anext(reader, None) for edge, reader in self._readers.items()}
        if all(part is None for part in parts.values()):
            raise StopAsyncIteration
        return join(parts)


async def merge(sources: Sequence[AsyncIterator[Packet]]) -> AsyncGenerator[Packet, None]:
    """Yields the packets of all sources in arrival order. Reads one packet ahead of each source."""
    reading = {asyncio.ensure_future(_next(source)): source for source in sources}
    try:
        while reading:
            await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            # One at a time, because a packet may hold a lease and must not be retained after its use.
            task = next(task for task in reading if task.done())
            source = reading.pop(task)
            packet = task.result()
            if packet is not None:
                reading[asyncio.ensure_future(_next(source))] = source
                yield packet
            del packet, task
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _next(source: AsyncIterator[Packet]) -> Packet | None:
    return await anext(source, None)


def join(parts: Mapping[str, Packet | None]) -> Packet:
    """Returns the tensors of several edges as one packet; raises InvalidChunkError if two carry the same tensor."""
    tensors: dict[str, Array] = {}
    metadata: dict[str, MetadataValue] = {}
    for edge, part in parts.items():
        if part is None:
            raise InvalidChunkError(
                f"edge {edge} ended sooner than {', '.join(other for other in parts if parts[other] is not None)}; "
                "joined edges must bring the same number of packets"
            )
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise InvalidChunkError(f"edge {edge} and another both carry {', '.join(sorted(twice))}")
        tensors.update(part.tensors)
        metadata.update(part.metadata)
    return Packet(tensors, metadata)


def check_packet(packet: Packet, signature: Signature) -> Packet:
    """Returns the packet; raises InvalidChunkError if a required tensor is missing or a tensor has another type."""
    for name, spec in signature.accepts.items():
        tensor = packet.tensors.get(name)
        if tensor is not None:
            spec.check(name, tensor)
        elif name not in signature.optional:
            raise InvalidChunkError(
                f"tensor {name!r} is missing; the packet holds {', '.join(packet.tensors) or 'none'}"
            )
    return packet
