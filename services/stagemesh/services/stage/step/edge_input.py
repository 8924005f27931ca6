"""Transforms and validates the packets of an incoming edge before an engine receives them."""

from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping

from stagemesh.common.descriptors import import_factory, load_transform_descriptor
from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.tensors import Array, TensorSpec
from stagemesh.connectors.edge import Packet
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.services.engines.base import Transform


class EdgeInput:
    """An async iterator over the transformed and validated packets of an inlet.

    Calls `on_first` before it returns the first packet.
    """

    def __init__(
        self,
        inlet: Inlet,
        *,
        edge: str,
        accepts: Mapping[str, TensorSpec],
        transform: Transform | None,
        on_first: Callable[[], None],
    ) -> None:
        self._packets = aiter(inlet)
        self._edge, self._accepts, self._transform = edge, accepts, transform
        self._on_first: Callable[[], None] | None = on_first
        self._pending: deque[Packet] = deque()
        self.waits = False
        """Whether the engine is waiting for a packet that has not arrived."""
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Packet]:
        """Returns this object, because a flow can be read only once."""
        return self

    async def __anext__(self) -> Packet:
        """Returns the next packet.

        This is not a generator, because a generator's frame would retain the last packet and its lease.
        """
        while not self._pending:
            if self._ended:
                raise StopAsyncIteration
            await self._pull()
        if self._on_first is not None:
            self._on_first()
            self._on_first = None
        return self._pending.popleft()

    async def _pull(self) -> None:
        self.waits = True
        try:
            packet = await anext(self._packets, None)
        finally:
            self.waits = False
        self._ended = packet is None
        if self._transform is not None:
            made = self._transform.finish() if packet is None else self._transform.push(packet)
        else:
            made = [] if packet is None else [packet]
        self._pending.extend(accepted_part(each, self._accepts, edge=self._edge) for each in made)


def make_transform(name: str) -> Transform | None:
    """Returns a new instance of the named transform, or None if the name is empty.

    Raises NotFoundError if the name is unknown.
    """
    if not name:
        return None
    transform: Transform = import_factory(load_transform_descriptor(name).factory)()
    return transform


def accepted_part(packet: Packet, accepts: Mapping[str, TensorSpec], *, edge: str) -> Packet:
    """Returns a packet with only the tensors that the stage accepts.

    Raises InvalidChunkError if the packet has no such tensor, or if a dtype or shape does not match. A symbol in the
    shapes represents the same length in all tensors of the packet.
    """
    taken = {name: tensor for name, tensor in packet.tensors.items() if name in accepts}
    if not taken:
        raise InvalidChunkError(
            f"edge {edge} carries {', '.join(packet.tensors) or 'no tensor'}; this stage accepts {', '.join(accepts)}",
            metadata={"edge": edge},
        )
    lengths: dict[str, int] = {}
    for name, tensor in taken.items():
        try:
            accepts[name].check(name, tensor)
            _check_symbols(name, tensor, accepts[name], lengths=lengths)
        except InvalidChunkError as exc:
            raise InvalidChunkError(f"edge {edge}: {exc.message}", metadata={"edge": edge}) from exc
    return Packet(taken, packet.metadata)


def _check_symbols(name: str, tensor: Array, spec: TensorSpec, *, lengths: dict[str, int]) -> None:
    for symbol, length in zip(spec.shape, tensor.shape, strict=True):
        if isinstance(symbol, str) and lengths.setdefault(symbol, length) != length:
            raise InvalidChunkError(
                f"tensor {name!r} has {length} {symbol}, but another tensor of its chunk has {lengths[symbol]}"
            )
