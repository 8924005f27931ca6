"""The inputs of a step: the packets of its edges, transformed and checked, and the stored media files of its prompt."""

from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, UnsupportedError
from stagemesh.common.media.store import FetchedFile, MediaStore
from stagemesh.common.plugins.descriptors import TransformDescriptor
from stagemesh.common.plugins.entry_points import import_factory, load_descriptor
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.packets import Packet, Ticket, Transform, packets_problem
from stagemesh.services.engines.prompts import MediaFile, Prompt, media_of
from stagemesh.services.engines.user_errors import UserCode, UserErrors
from stagemesh.services.stage.step.checks import ResultCheck, check_lengths
from stagemesh.v1 import request_pb2


@asynccontextmanager
async def opened_media(prompt: Prompt | None, store: MediaStore | None) -> AsyncGenerator[None]:
    """Opens and checks all stored files of the prompt (`MediaFile.stored`). Closes them when the block is exited.

    `store` is None if the pipeline has no store. Raises UnsupportedError if the prompt refers to a file nevertheless,
    InvalidRequestError (INVALID_MEDIA) if a file is empty, and the errors of `MediaStore.fetch`.
    """
    with ExitStack() as stack:
        for medium in media_of(prompt):
            if isinstance(medium, MediaFile) and medium.reference is not None:
                medium.stored = await _fetch(medium.reference, store)
                stack.callback(medium.stored.close)
        yield


async def _fetch(reference: request_pb2.MediaFile, store: MediaStore | None) -> FetchedFile:
    if store is None:
        raise UnsupportedError(
            "this stage has no store for media; send the file inline, or add `media:` to the pipeline file"
        )
    file = await store.fetch(reference)
    if not file.size_bytes:
        file.close()
        raise InvalidRequestError(f"{reference.uri} is empty; omit it", reason="INVALID_MEDIA")
    return file


class EdgeInput:
    """The engine's input from one incoming edge. Iterates over the inlet's packets, transformed and validated."""

    def __init__(
        self,
        inlet: Inlet,
        *,
        edge: str,
        transform: "EdgeTransform | None",
        accepts: Mapping[str, TensorSpec],
        on_packet: Callable[[], None],
    ) -> None:
        self._packets = aiter(inlet)
        self._edge, self._accepts, self._on_packet, self._transform = edge, accepts, on_packet, transform
        self._pending: deque[Packet] = deque()
        self.waits = False
        """Whether the engine is waiting for a packet that has not arrived."""
        self._ended = False

    def __aiter__(self) -> AsyncIterator[Packet]:
        """Returns this object itself, because an input can be read only once."""
        return self

    async def __anext__(self) -> Packet:
        """Returns the next packet. Raises StopAsyncIteration after the last packet.

        This method is used instead of an async generator, because a generator's frame would retain the last packet and
        the packet's lease.
        """
        while not self._pending:
            if self._ended:
                raise StopAsyncIteration
            await self._pull()
        self._on_packet()
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


def accepted_part(packet: Packet, accepts: Mapping[str, TensorSpec], *, edge: str) -> Packet:
    """Returns a packet that contains only the tensors and tickets that the stage accepts.

    `edge` is the edge's name in errors. Raises InvalidChunkError if the packet contains none of them, or if a dtype, a
    shape or the kind of a ticket does not match. A symbol in the accepted shapes represents the same length in all
    tensors of the packet.
    """
    taken = {name: tensor for name, tensor in packet.tensors.items() if name in accepts}
    tickets = _accepted_tickets(packet, accepts, edge=edge) if packet.tickets else packet.tickets
    if not taken and not tickets:
        names = ", ".join((*packet.tensors, *packet.tickets)) or "no tensor"
        raise InvalidChunkError(
            f"edge {edge} carries {names}; this stage accepts {', '.join(accepts)}", metadata={"edge": edge}
        )
    lengths: dict[str, int] = {}
    for name, tensor in taken.items():
        try:
            accepts[name].check(name, tensor)
            check_lengths(name, tensor, accepts[name], lengths=lengths)
        except InvalidChunkError as exc:
            raise InvalidChunkError(f"edge {edge}: {exc.message}", metadata={"edge": edge}) from exc
    return Packet(taken, packet.metadata, tickets)


def _accepted_tickets(packet: Packet, accepts: Mapping[str, TensorSpec], *, edge: str) -> Mapping[str, Ticket]:
    tickets = {name: ticket for name, ticket in packet.tickets.items() if name in accepts}
    for name, ticket in tickets.items():
        if accepts[name].ticket_kind != ticket.kind:
            raise InvalidChunkError(
                f"edge {edge}: {name!r} is {TensorSpec.ticket(ticket.kind)}; expected {accepts[name]}",
                metadata={"edge": edge},
            )
    return tickets


class EdgeTransform:
    """The transform of one flow, which passes tickets. Its results are checked by its descriptor.

    An error of the transform names the transform and the edge. The constructor raises NotFoundError if the name is
    unknown.
    """

    def __init__(self, name: str, *, edge: str, model: Path | None, user_errors: UserErrors) -> None:
        descriptor = load_descriptor(TransformDescriptor, name)
        self._code = UserCode(f"transform {name} of edge {edge}", descriptor.factory, user_errors, edge=edge)
        self._results = ResultCheck(descriptor.gives, maker=self._code.name, metadata={"edge": edge})
        with self._code.converted_errors():
            self._transform: Transform = import_factory(descriptor.factory)(model)

    def push(self, packet: Packet) -> Sequence[Packet]:
        with self._code.converted_errors():
            made = self._transform.push(packet)
        self._check(made)
        return _with_tickets(packet, made) if packet.tickets else made

    def finish(self) -> Sequence[Packet]:
        with self._code.converted_errors():
            made = self._transform.finish()
        self._check(made)
        return made

    def _check(self, made: Sequence[Packet]) -> None:
        if problem := packets_problem(made):
            raise self._code.invalid_result(problem, wanted="a list of Packets")
        for packet in made:
            self._results.check(packet)


def _with_tickets(packet: Packet, made: Sequence[Packet]) -> Sequence[Packet]:
    """Returns the packets that a transform made of `packet`, the first of which has the tickets of `packet`."""
    if any(each.tickets for each in made):
        return made
    first, *rest = made or [Packet({}, packet.metadata)]
    return [Packet(first.tensors, first.metadata, packet.tickets), *rest]
