"""Combines the packets of a stage's edges into the inputs of the stage's engine.

One packet from each joined edge forms one input. Each packet of an edge that is not joined forms a separate input.
Separate inputs are processed in arrival order, which is not deterministic across edges.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing

import numpy as np

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError
from stagemesh.common.plugins.descriptors import TEXT, Signature
from stagemesh.common.wire.tensors import Array
from stagemesh.connectors.flow.inlet import merge
from stagemesh.connectors.packets import MetadataValue, Packet, Ticket
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.prompts import Conversation, media_of, text_beside_media


async def packets_of(task: Task, signature: Signature) -> AsyncGenerator[Packet, None]:
    """Yields the inputs of one request: the client's prompt, or the packets of the request's edges.

    Callers must iterate within `aclosing`, which stops the tasks that read from edges.

    Raises InvalidChunkError if the packets of the joined edges do not match each other or lack a tensor, and
    InvalidRequestError if the request has no input for the stage.
    """
    if not task.inlets and (not signature.accepts or signature.needs_text_alone):
        yield prompt_packet(task, media=signature.media)
        return
    if not task.inlets:
        raise InvalidRequestError(
            f"the stage has no input; bind an edge that carries {', '.join(signature.accepts)}", reason="MISSING_INPUT"
        )
    async with aclosing(merge(sources_of(task))) as packets:
        async for packet in packets:
            check_complete(packet, signature)
            yield packet


def prompt_packet(task: Task, *, media: bool = False) -> Packet:
    """Returns one packet with the client's text and tensors.

    With `media`, the text may be that of a message with media. Raises InvalidRequestError if the prompt is not text.
    """
    is_plain = not isinstance(task.prompt, Conversation) and not media_of(task.prompt)
    prompt = text_beside_media(task.prompt) if media or is_plain else None
    if prompt is None:
        accepted = "text or as one message" if media else "text, not as a conversation or token ids"
        raise InvalidRequestError(f"this stage accepts its prompt only as {accepted}", reason="INVALID_PROMPT")
    text: Array = np.frombuffer(prompt.encode(), np.uint8)
    return Packet({**task.tensors, TEXT: text})


def sources_of(task: Task) -> Sequence[AsyncIterator[Packet]]:
    """Returns the iterators over a task's inputs.

    One iterator yields the combined packets of all joined edges. Each edge that is not joined (`Task.apart`) has its
    own iterator.
    """
    together = {edge: aiter(inlet) for edge, inlet in task.inlets.items() if edge not in task.apart}
    apart = [aiter(inlet) for edge, inlet in task.inlets.items() if edge in task.apart]
    if len(together) == 1:
        return [*together.values(), *apart]
    return [JoinedEdges(together), *apart] if together else apart


class JoinedEdges(AsyncIterator[Packet]):
    """An async iterator that combines one packet from each edge into one packet. The edges can be read only once.

    All edges must end after the same number of packets.
    """

    def __init__(self, readers: Mapping[str, AsyncIterator[Packet]]) -> None:
        self._readers = readers

    async def __anext__(self) -> Packet:
        """Returns the combination of the next packet of each edge.

        Raises StopAsyncIteration if all edges have ended, and InvalidChunkError if only some of the edges have ended.
        """
        parts = {edge: await anext(reader, None) for edge, reader in self._readers.items()}
        if all(part is None for part in parts.values()):
            raise StopAsyncIteration
        return join(parts)


def join(parts: Mapping[str, Packet | None]) -> Packet:
    """Combines one packet from each edge into one packet.

    `parts` maps an edge's name to its packet, or to None at its end. Raises InvalidChunkError if two packets contain a
    tensor of the same name, or if an edge has ended.
    """
    tensors: dict[str, Array] = {}
    tickets: dict[str, Ticket] = {}
    metadata: dict[str, MetadataValue] = {}
    for edge, part in parts.items():
        if part is None:
            raise InvalidChunkError(
                f"edge {edge} ended sooner than {', '.join(other for other in parts if parts[other] is not None)}; "
                "joined edges must deliver the same number of packets"
            )
        twice = (tensors.keys() | tickets.keys()) & (part.tensors.keys() | part.tickets.keys())
        if twice:
            raise InvalidChunkError(f"edge {edge} and another edge both carry {', '.join(sorted(twice))}")
        tensors.update(part.tensors)
        tickets.update(part.tickets)
        metadata.update(part.metadata)
    return Packet(tensors, metadata, tickets)


def check_complete(packet: Packet, signature: Signature) -> None:
    """Raises InvalidChunkError if a packet lacks a required tensor or ticket.

    The dtypes and shapes were checked when the packet arrived over its edge.
    """
    present = (*packet.tensors, *packet.tickets)
    for name in signature.accepts:
        if name not in signature.optional and name not in present:
            names = ", ".join(present) or "no tensor"
            raise InvalidChunkError(f"tensor {name!r} is missing; the packet contains {names}")
