"""What an engine that joins is fed: the client's prompt, or the packets of its edges.

Packets of edges that are not apart come together: one of each makes one input. Those of an edge that is apart are
inputs of their own, in the order in which they arrive; between such edges that order is nobody's.
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
    """The inputs of one request. Iterate within `aclosing`.

    Raises InvalidChunkError where edges do not match each other or what the stage accepts.
    """
    if not signature.accepts and not task.inlets:
        yield prompt_packet(task)
        return
    if signature.accepts and not task.inlets:
        raise InvalidRequestError(
            f"nothing flows in; this stage needs an edge that carries {', '.join(signature.accepts)}"
        )
    sources = sources_of(task)
    if len(sources) == 1:
        async for packet in sources[0]:
            yield checked(packet, signature)
        return
    merging = merged(sources)
    try:
        async for packet in merging:
            yield checked(packet, signature)
    finally:
        await merging.aclose()


def prompt_packet(task: Task) -> Packet:
    """The client's text and tensors as one packet; raises InvalidRequestError for a prompt that is not text."""
    if not isinstance(task.prompt, str):
        raise InvalidRequestError("this stage takes its prompt as text, not as a conversation or token ids")
    text: Array = np.frombuffer(task.prompt.encode(), np.uint8)
    return Packet({**task.tensors, "text": text})


def sources_of(task: Task) -> Sequence[AsyncIterator[Packet]]:
    """Where inputs come from: the edges that go together as one, and each that is apart."""
    together = {edge: aiter(inlet) for edge, inlet in task.inlets.items() if edge not in task.apart}
    apart = [aiter(inlet) for edge, inlet in task.inlets.items() if edge in task.apart]
    if len(together) == 1:
        return [*together.values(), *apart]
    return [Together(together), *apart] if together else apart


class Together:
    """Several edges as one: a packet of each makes one, and all end at once."""

    def __init__(self, readers: Mapping[str, AsyncIterator[Packet]]) -> None:
        self._readers = readers

    def __aiter__(self) -> AsyncIterator[Packet]:
        """Itself: flows are read once."""
        return self

    async def __anext__(self) -> Packet:
        """The next of each; raises InvalidChunkError where one has ended and another has not."""
        parts = {edge: await anext(reader, None) for edge, reader in self._readers.items()}
        if all(part is None for part in parts.values()):
            raise StopAsyncIteration
        return join(parts)


async def merged(sources: Sequence[AsyncIterator[Packet]]) -> AsyncGenerator[Packet, None]:
    """The packets of all sources as they come. It reads one packet ahead of each."""
    reading = {asyncio.ensure_future(_next(source)): source for source in sources}
    try:
        while reading:
            await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            # One at a time: what nobody uses any more is not to be held on to, for a packet may hold a lease.
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
    """The tensors that came over several edges as one packet; raises InvalidChunkError where they clash."""
    tensors: dict[str, Array] = {}
    metadata: dict[str, MetadataValue] = {}
    for edge, part in parts.items():
        if part is None:
            raise InvalidChunkError(
                f"edge {edge} ended sooner than {', '.join(other for other in parts if parts[other] is not None)}; "
                "edges that are joined bring equally many packets"
            )
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise InvalidChunkError(f"edge {edge} and another both carry {', '.join(sorted(twice))}")
        tensors.update(part.tensors)
        metadata.update(part.metadata)
    return Packet(tensors, metadata)


def checked(packet: Packet, signature: Signature) -> Packet:
    """The packet; raises InvalidChunkError where it lacks what the stage needs, or has it of another type."""
    for name, spec in signature.accepts.items():
        tensor = packet.tensors.get(name)
        if tensor is not None:
            spec.check(name, tensor)
        elif name not in signature.optional:
            raise InvalidChunkError(f"tensor {name!r} is missing; came with {', '.join(packet.tensors) or 'none'}")
    return packet
