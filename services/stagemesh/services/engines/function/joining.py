"""What a function stage is fed: the client's prompt, or the packets of its edges joined one by one."""

from collections.abc import AsyncGenerator, Mapping

import numpy as np

from stagemesh.connectors.base import MetadataValue, Packet
from stagemesh.connectors.errors import InvalidChunkError, InvalidRequestError
from stagemesh.connectors.tensors import Array, TensorSpec
from stagemesh.services.engines.base import Task


async def packets_of(task: Task, *, accepts: Mapping[str, TensorSpec]) -> AsyncGenerator[Packet, None]:
    """The packets for one request; raises InvalidChunkError where edges do not match each other or `accepts`."""
    if not accepts and not task.inlets:
        yield prompt_packet(task)
        return
    if accepts and not task.inlets:
        raise InvalidRequestError(f"nothing flows in; this stage needs an edge that carries {', '.join(accepts)}")
    readers = {edge: aiter(inlet) for edge, inlet in task.inlets.items()}
    while True:
        parts = {edge: await anext(reader, None) for edge, reader in readers.items()}
        if all(part is None for part in parts.values()):
            return
        yield _checked(join(parts), accepts)


def prompt_packet(task: Task) -> Packet:
    """The client's text and tensors as one packet; raises InvalidRequestError for a prompt that is not text."""
    if not isinstance(task.prompt, str):
        raise InvalidRequestError("this stage takes its prompt as text, not as a conversation or token ids")
    text: Array = np.frombuffer(task.prompt.encode(), np.uint8)
    return Packet({**task.tensors, "text": text})


def join(parts: Mapping[str, Packet | None]) -> Packet:
    """The tensors that came over several edges as one packet; raises InvalidChunkError where they clash."""
    tensors: dict[str, Array] = {}
    metadata: dict[str, MetadataValue] = {}
    for edge, part in parts.items():
        if part is None:
            raise InvalidChunkError(f"edge {edge} ended sooner than {', '.join(set(parts) - {edge})}")
        twice = tensors.keys() & part.tensors.keys()
        if twice:
            raise InvalidChunkError(f"edge {edge} and another both carry {', '.join(sorted(twice))}")
        tensors.update(part.tensors)
        metadata.update(part.metadata)
    return Packet(tensors, metadata)


def _checked(packet: Packet, accepts: Mapping[str, TensorSpec]) -> Packet:
    for name, spec in accepts.items():
        tensor = packet.tensors.get(name)
        if tensor is None:
            raise InvalidChunkError(f"tensor {name!r} is missing; came with {', '.join(packet.tensors) or 'none'}")
        spec.check(name, tensor)
    return packet
