"""Which part of what an engine emits goes over an edge."""

from collections.abc import Callable
from collections.abc import Set as AbstractSet

from stagemesh.common.descriptors import Signature
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.base import TokenSelection
from stagemesh.services.stage.step.spec import OutputBinding, StepSpec


def selection_of(binding: OutputBinding) -> Callable[[Packet], Packet | None] | None:
    """Returns a function that selects an edge's part of a packet, or None if the edge carries whole packets.

    The function returns None for a packet of which the edge carries nothing.
    """
    if not binding.tensors and binding.tokens != "last":
        return None

    def select(packet: Packet) -> Packet | None:
        picked = _named(packet, binding.tensors)
        return _sampled_from(picked) if binding.tokens == "last" and picked is not None else picked

    return select


def wanted_of(order: StepSpec) -> frozenset[str] | None:
    """The tensors that an order's edges and its caller take; None for all."""
    if any(not binding.tensors for binding in order.outputs):
        return None
    return frozenset(order.streamed).union(*(binding.tensors for binding in order.outputs))


def tokens_of(order: StepSpec, signature: Signature) -> TokenSelection:
    """The rows that are taken by any of an order's edges, or by its caller, who takes all of a tensor."""
    rows = _with_rows(signature)
    taken = _taken_by_edges(order, rows)
    return "last" if taken == {"last"} and not rows.intersection(order.streamed) else order.task.tokens


def rows_are_those_of_edges(order: StepSpec, signature: Signature) -> bool:
    """Whether each edge carries every row of the tensors that it carries, so that one count holds for all."""
    return _taken_by_edges(order, _with_rows(signature)) <= {tokens_of(order, signature)}


def _with_rows(signature: Signature) -> set[str]:
    return {name for name, emitted in signature.emits.items() if emitted.kind == "tensor"}


def _taken_by_edges(order: StepSpec, rows: AbstractSet[str]) -> set[TokenSelection]:
    return {binding.tokens for binding in order.outputs if not binding.tensors or binding.tensors & rows}


def _named(packet: Packet, names: AbstractSet[str]) -> Packet | None:
    if not names or packet.tensors.keys() <= names:
        return packet
    tensors = {name: tensor for name, tensor in packet.tensors.items() if name in names}
    return Packet(tensors, packet.metadata) if tensors else None


def _sampled_from(packet: Packet) -> Packet | None:
    """The rows from the prompt's last token on."""
    start, prompt_tokens = packet.metadata.get("token_start"), packet.metadata.get("prompt_tokens")
    if not isinstance(start, int) or not isinstance(prompt_tokens, int):
        return packet
    skipped = prompt_tokens - 1 - start
    if skipped <= 0:
        return packet
    tensors = {name: tensor[skipped:] for name, tensor in packet.tensors.items()}
    left = len(next(iter(tensors.values())))
    return Packet(tensors, {**packet.metadata, "token_start": start + skipped}) if left else None
