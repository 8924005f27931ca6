"""The spec of a step: the content of an ExecuteStep or RebindStep call, independent of protobuf."""

from collections.abc import Mapping
from dataclasses import dataclass

from stagemesh.common.connector_descriptors import ConnectorName
from stagemesh.common.descriptors import Signature
from stagemesh.connectors.edge import ChunkPolicy, Packet
from stagemesh.services.engines.base import Task, TokenSelection

STATE_EDGE = "@state"
"""The name of the edge that transfers a paused request's state to the replica that resumes the request. This edge is
not part of the pipeline."""


@dataclass(frozen=True)
class InputBinding:
    """An incoming edge and its producer replica."""

    edge: str
    producer: str
    transform: str = ""
    """The name of a transform. Empty if the packets are not transformed."""
    apart: bool = False
    """Whether each packet of this edge is a separate input. If False, packets are joined with packets of other edges.
    """
    attempt: int = 0
    """The attempt to which the edge's flow belongs. 0 means the step's attempt."""


@dataclass(frozen=True)
class OutputBinding:
    """An outgoing edge and its consumer replica."""

    edge: str
    consumer: str
    endpoint: str
    connector: ConnectorName
    policy: ChunkPolicy
    tensors: frozenset[str] = frozenset()
    """The emitted tensors that the edge carries. Empty means all emitted tensors."""
    tokens: TokenSelection = "all"
    attempt: int = 0
    """The attempt to which the edge's flow belongs. 0 means the step's attempt."""

    @property
    def is_selective(self) -> bool:
        """Whether the edge may carry only some tensors or rows of a packet."""
        return bool(self.tensors) or self.tokens == "last"

    def select(self, packet: Packet) -> Packet | None:
        """Returns the tensors and rows of a packet that the edge carries, or None if it carries none of them."""
        if self.tensors and not packet.tensors.keys() <= self.tensors:
            tensors = {name: tensor for name, tensor in packet.tensors.items() if name in self.tensors}
            if not tensors:
                return None
            packet = Packet(tensors, packet.metadata)
        return _from_last_prompt_token(packet) if self.tokens == "last" else packet


@dataclass(frozen=True)
class StepSpec:
    """One stage's part of a request, as specified by an ExecuteStep call."""

    step_id: str
    attempt: int
    task: Task
    """The task for the engine, without inlets. The run opens the inlets."""
    inputs: tuple[InputBinding, ...] = ()
    outputs: tuple[OutputBinding, ...] = ()
    streamed: tuple[str, ...] = ()
    """The names of the emitted tensors that are streamed to the caller."""
    fingerprint: bytes = b""
    """A digest of the call. Calls with equal content have equal fingerprints."""

    @property
    def takes_state(self) -> bool:
        """Whether the state from which the step resumes arrives over an edge."""
        return any(binding.edge == STATE_EDGE for binding in self.inputs)

    @property
    def request_id(self) -> str:
        return self.task.request_id

    @property
    def wanted_tensors(self) -> frozenset[str] | None:
        """The tensors that any edge or the caller requests. None means all tensors."""
        if any(not binding.tensors for binding in self.outputs):
            return None
        return frozenset(self.streamed).union(*(binding.tensors for binding in self.outputs))

    def wanted_rows(self, signature: Signature) -> TokenSelection:
        """Returns "last" if all edges request only the rows of the last tokens, otherwise "all".

        A caller always receives all rows of a tensor.
        """
        only_last = self._rows_of_edges(signature) == {"last"}
        return "last" if only_last and not _tensors_with_rows(signature).intersection(self.streamed) else "all"

    def edges_take_all_rows(self, signature: Signature) -> bool:
        """Returns whether each edge carries every emitted row of its tensors.

        One row count then applies to all edges.
        """
        return self._rows_of_edges(signature) <= {self.wanted_rows(signature)}

    def _rows_of_edges(self, signature: Signature) -> set[TokenSelection]:
        names = _tensors_with_rows(signature)
        return {each.tokens for each in self.outputs if not each.tensors or each.tensors & names}


@dataclass(frozen=True)
class InputRebinding:
    """The new producer of an incoming edge."""

    binding: InputBinding
    first_rows: Mapping[str, int]
    """The number of rows before the first row of the new flow, by tensor. 0 for tensors that are not listed."""


@dataclass(frozen=True)
class Rebinding:
    """New peer replicas for some edges of a step."""

    request_id: str
    step_id: str
    inputs: tuple[InputRebinding, ...] = ()
    outputs: tuple[OutputBinding, ...] = ()


def _tensors_with_rows(signature: Signature) -> set[str]:
    return {name for name, emitted in signature.emits.items() if emitted.kind == "tensor"}


def _from_last_prompt_token(packet: Packet) -> Packet | None:
    """Returns the rows from the prompt's last token onwards, or None if the packet contains only earlier rows."""
    start, prompt_tokens = packet.metadata.get("token_start"), packet.metadata.get("prompt_tokens")
    if not isinstance(start, int) or not isinstance(prompt_tokens, int):
        return packet
    skipped = prompt_tokens - 1 - start
    if skipped <= 0:
        return packet
    tensors = {name: tensor[skipped:] for name, tensor in packet.tensors.items()}
    left = len(next(iter(tensors.values())))
    return Packet(tensors, {**packet.metadata, "token_start": start + skipped}) if left else None
