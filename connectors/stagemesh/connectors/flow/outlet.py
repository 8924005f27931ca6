"""The producer side of a flow, and the fan-out, which sends the same packets over several flows.

An outlet has one attempt at a time. If the consumer becomes unreachable, a new attempt sends all chunks to another
consumer.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from copy import copy
from types import MappingProxyType
from typing import TypeAlias

from stagemesh.common.errors import CancelledRequestError, NotReadyError, StagemeshError
from stagemesh.common.plugins.connectors import GRPC, ConnectorName, number_of
from stagemesh.common.wire.chunk_sizes import ChunkPolicy, FramesPolicy, StepPolicy
from stagemesh.connectors import wire
from stagemesh.connectors.arena.arena import Arena, Region
from stagemesh.connectors.base import ArenaRange, MemoryAccount
from stagemesh.connectors.flow.chunking import Chunker
from stagemesh.connectors.flow.outlet_attempt import OutletAttempt, Phase
from stagemesh.connectors.flow.sent_chunks import Retention, SentChunk, SentChunks
from stagemesh.connectors.packets import CONTEXT, EdgeKey, OfferedTicket, Packet, RowCounter, Transform
from stagemesh.connectors.peer_timeouts import is_recoverable
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.v1 import chunk_pb2, control_pb2, request_pb2

BULK_BYTES = 256 << 10
"""The chunk size, in bytes, above which a flow uses the bulk stream. Applies only to chunks sent as fragments."""
_NOWHERE = ArenaRange(0, 0, 0)
NO_ROWS: Mapping[str, int] = MappingProxyType({})

Select: TypeAlias = Callable[[Packet], Packet | None]
"""A function that selects the part of a packet that an outlet sends. Returns None if the outlet sends nothing."""


class Outlet:
    """The producer side of a flow. Only one task may use it.

    If the consumer terminates or disconnects, another consumer can replace it within `rebind_s` seconds. The new
    consumer receives all chunks again, beginning with chunk 0. Packets are cut into chunks only once, so that every
    consumer receives the same chunks.
    """

    def __init__(
        self,
        key: EdgeKey,
        connector: ConnectorName,
        *,
        policy: ChunkPolicy,
        retention: Retention,
        rebind_s: float = 0.0,
        first_rows: Mapping[str, int] = NO_ROWS,
    ) -> None:
        """Creates the flow's first attempt, which transfers the chunks over `connector`.

        `policy` cuts the packets into chunks. The chunks are written into the arena of `retention`. 0 for `rebind_s`
        means that no other consumer can replace the first consumer. `first_rows` is the number of rows of each tensor
        that an earlier attempt of the producer has sent, by name.
        """
        self.chunks = SentChunks(retention)
        self.transform: Transform | None = None
        """The transform that is applied to the packets. Set it before the first packet. None if there is none."""
        self.is_over = False
        """Whether the flow has ended, so that no consumer can receive further data."""
        self._chunker = None if isinstance(policy, StepPolicy) else Chunker(policy)
        self._has_context = isinstance(policy, FramesPolicy) and policy.left_context_frames > 0
        self._arena, self._account = retention.arena, MemoryAccount()
        self._rebind_s = rebind_s
        self._digest = wire.FlowDigest()
        self._rows = RowCounter(first_rows)
        self._shape: wire.PacketShape | None = None
        self._error: StagemeshError | None = None
        self._cut_timer: asyncio.TimerHandle | None = None
        """The timer that cuts the retained rows if the producer pauses. None if there are no such rows."""
        self._cutting: asyncio.Task[None] | None = None
        """The task that sends the rows that the timer has cut."""
        self._rebind_timer: asyncio.TimerHandle | None = None
        self.attempt = OutletAttempt(key, connector, self.chunks, on_over=self._attempt_over)

    @property
    def usage(self) -> request_pb2.EdgeUsage:
        """The numbers of chunks and of payload bytes that the flow has sent."""
        attempt, chunks = self.attempt, self.chunks
        return request_pb2.EdgeUsage(
            edge=attempt.key.edge,
            connector=number_of(attempt.connector),
            chunks=chunks.next_seq - chunks.ended,
            size_bytes=chunks.sent_bytes,
            handed_over_bytes=chunks.handed_over_bytes,
        )

    def report(self, *, consumer: str = "") -> control_pb2.FlowReport:
        """Returns a snapshot of the flow's progress, as seen by the producer. `consumer` is the consumer's name."""
        attempt, chunks = self.attempt, self.chunks
        return control_pb2.FlowReport(
            edge=attempt.key.edge,
            peer=consumer,
            connector=number_of(attempt.connector),
            connected=attempt.phase is Phase.OPEN,
            chunks=chunks.next_seq,
            waiting_chunks=len(chunks.unacked),
            waiting_bytes=sum(sent.size_bytes for sent in chunks.unacked),
            credit_bytes=max(0, attempt.credit.size_bytes - chunks.sent_bytes),
            wanted_bytes=chunks.wanted_bytes,
            ended=chunks.ended,
            handed_over_bytes=chunks.handed_over_bytes,
        )

    @property
    def is_lost(self) -> bool:
        """Whether the current attempt has failed."""
        return self.attempt.phase is Phase.FAILED

    def has_credit(self, size_bytes: int) -> bool:
        """Returns whether the consumer's remaining credit suffices for a chunk of `size_bytes` payload bytes."""
        chunks, credit = self.chunks, self.attempt.credit
        return chunks.sent_bytes + size_bytes <= credit.size_bytes and chunks.next_seq < credit.chunks

    async def send(self, packet: Packet) -> None:
        """Sends a packet. Waits for credit and for free arena memory, but does not wait for the delivery.

        The flow adds its own references to the packet's tickets. Raises the error that ended the flow, if the flow has
        ended, and InvalidChunkError if the policy would cut a packet with tickets.
        """
        if self.transform is None and self._chunker is None:
            # Without this case, every chunk would pass through three coroutines.
            await self._send(packet)
            return
        for part in self.transform.push(packet) if self.transform else (packet,):
            await self._cut(part)

    async def finish(self) -> None:
        """Sends the rows that the transform and the chunk policy have retained, and then the End message.

        Waits until the consumer has received all chunks. Raises the error that ended the flow if the flow fails first.
        """
        for part in self.transform.finish() if self.transform else ():
            await self._cut(part)
        await self._end_pause()
        for chunk in self._chunker.finish() if self._chunker else ():
            await self._send(chunk)
        self._check_error()
        if not self.chunks.ended:
            self._append(SentChunk(self.chunks.next_seq, tail=chunk_pb2.Chunk(end=self._digest.end())))
        while not self.chunks.is_delivered:
            self._check_error()
            await self.chunks.changed.wait()

    def abort(self, error: StagemeshError) -> None:
        """Sends an Abort message with `error`, unless the flow has ended. Prevents a later rebind. Never raises."""
        if self.is_over:
            return
        edge, chunks = self.attempt.key.edge, self.chunks
        if self.is_lost:
            chunks.release()
        elif not chunks.ended:
            # The attempt continues until the Abort has arrived.
            chunks.drop_beyond(self.attempt.credit)
            abort = chunk_pb2.ChunkAbort(error=error_to_wire(error))
            self._append(SentChunk(chunks.next_seq, tail=chunk_pb2.Chunk(abort=abort)))
        self._error = CancelledRequestError(f"edge {edge} was aborted: {error.message}", reason="ABORTED")
        self._end()

    # -- another consumer

    def check_rebindable(self) -> None:
        """Raises NotReadyError (CHUNK_GONE) if no other consumer can receive the flow from its first chunk.

        This is the case if the flow has ended, or if some of its chunks or the state of some of its tickets are no
        longer retained.
        """
        if self.is_over or not self.chunks.can_restart:
            edge = self.attempt.key.edge
            raise NotReadyError(
                f"the first chunks of edge {edge} are no longer retained; run its producer again",
                reason="CHUNK_GONE",
                metadata={"edge": edge},
            )

    def rebind(self, key: EdgeKey, connector: ConnectorName) -> None:
        """Moves the flow to another consumer and sends all chunks again, beginning with chunk 0.

        `key` and `connector` belong to the new attempt. Call `check_rebindable` first.
        """
        if self._rebind_timer is not None:
            self._rebind_timer.cancel()
        # Ends the previous attempt first, because the next attempt may use the same key on the same link.
        self.attempt.supersede()
        self.chunks.restart()
        self.attempt = OutletAttempt(key, connector, self.chunks, on_over=self._attempt_over)
        self.chunks.changed.fire()

    # -- inner workings

    def _attempt_over(self, error: StagemeshError | None) -> None:
        """Called when the current attempt has ended. `error` is None if the consumer has committed the attempt.

        If the error is recoverable, waits up to `rebind_s` seconds for another consumer. Otherwise, ends the flow.
        """
        if error is not None and not self.is_over and self._rebind_s and is_recoverable(error):
            loop = asyncio.get_running_loop()
            self._rebind_timer = loop.call_later(self._rebind_s, self._fail, error)
            self.chunks.changed.fire()
        else:
            self._fail(error)

    def _fail(self, error: StagemeshError | None) -> None:
        self._error = self._error or error
        self.chunks.release()
        self._end()

    def _end(self) -> None:
        for running in (self._rebind_timer, self._cut_timer, self._cutting):
            if running is not None:
                running.cancel()
        self.transform = self._chunker = None  # They retain rows.
        self.chunks.changed.fire()
        self.is_over = True

    def _check_error(self) -> None:
        if self._error is not None:
            # Raises a copy, because a raised error references frames, which reference packets.
            raise copy(self._error)

    async def _cut(self, packet: Packet) -> None:
        await self._end_pause()
        for chunk in self._chunker.push(packet) if self._chunker else (packet,):
            await self._send(chunk)
        if self._chunker is not None and (due_s := self._chunker.due_s) is not None:
            loop = asyncio.get_running_loop()
            self._cut_timer = loop.call_later(max(0.0, due_s - time.monotonic()), self._cut_waiting)

    def _cut_waiting(self) -> None:
        """Sends the rows that the chunk policy has retained, because the producer pauses."""
        assert self._chunker is not None, "the end of the flow cancels the timer"
        self._cut_timer, chunks = None, self._chunker.cut()
        self._cutting = asyncio.create_task(self._send_all(chunks), name=f"pause of {self.attempt.key.edge}")
        # A producer that aborts the flow does not ask for the error.
        self._cutting.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _send_all(self, chunks: Sequence[Packet]) -> None:
        for chunk in chunks:
            await self._send(chunk)

    async def _end_pause(self) -> None:
        """Cancels the timer, and waits until the rows that it has cut are sent. Raises the error if that fails."""
        if self._cut_timer is not None:
            self._cut_timer.cancel()
            self._cut_timer = None
        cutting = self._cutting
        if cutting is not None:
            # The end of the flow cancels the task, but not the caller.
            await asyncio.wait([cutting])
            self._cutting = None
            if not cutting.cancelled():
                cutting.result()

    async def _send(self, packet: Packet) -> None:
        self._check_error()
        offered_s = time.monotonic()
        if not self._has_context and CONTEXT in packet.metadata:
            # A function has passed on this value of its input. It describes the chunks of another edge.
            metadata = {name: value for name, value in packet.metadata.items() if name != CONTEXT}
            packet = Packet(packet.tensors, metadata, packet.tickets)
        self._shape = shape = wire.shape_of(packet, last=self._shape)
        if packet.metadata:
            wire.check_metadata(packet.metadata)
        size_bytes = shape.size_bytes
        if not self.has_credit(size_bytes):
            await self._wait_for_credit(size_bytes)
        if packet.tickets:
            sent = self._with_tickets(packet, shape)
        elif size_bytes <= self.attempt.inline_limit_bytes:
            copies = {name: tensor.copy() for name, tensor in packet.tensors.items()}
            sent = SentChunk(self.chunks.next_seq, shape, copies, packet.metadata)
        elif (found := self._found(packet, shape)) is not None:
            sent = found
        else:
            region, tensors, places = await self._arena.write(packet.tensors, self._account, shape.layout)
            sent = SentChunk(self.chunks.next_seq, shape, tensors, packet.metadata, regions=(region,), places=places)
            if self._error is not None:
                sent.release()
                self._check_error()
        sent.offered_s = offered_s
        context = packet.metadata[CONTEXT] if self._has_context else 0
        assert isinstance(context, int), "the chunker has set it"
        sent.first_rows = self._rows.add(shape.rows, context=context)
        self._digest.add(shape)
        self._append(sent)

    def _with_tickets(self, packet: Packet, shape: wire.PacketShape) -> SentChunk:
        """Returns a chunk that has a reference to each ticket of `packet`, and copies of the tensors."""
        tickets: dict[str, OfferedTicket] = {}
        for name, ticket in packet.tickets.items():
            assert isinstance(ticket, OfferedTicket), "a stage sends the tickets of its own engine"
            ticket.retain()
            tickets[name] = ticket
        copies = {name: tensor.copy() for name, tensor in packet.tensors.items()}
        return SentChunk(self.chunks.next_seq, shape, copies, packet.metadata, tickets=tickets)

    async def _wait_for_credit(self, size_bytes: int) -> None:
        self.chunks.wanted_bytes = size_bytes
        began_s = time.monotonic()
        try:
            while not self.has_credit(size_bytes):
                self.attempt.mark_ready()
                await self.chunks.changed.wait()
                self._check_error()
        finally:
            self.chunks.wanted_bytes = 0
            self.attempt.meter.credit_wait_s += time.monotonic() - began_s

    def _append(self, sent: SentChunk) -> None:
        self.chunks.append(sent)
        self.attempt.add(sent)
        if sent.size_bytes > BULK_BYTES and not self.chunks.is_bulk:
            self.chunks.is_bulk = True
            if self.attempt.connector == GRPC:
                self.attempt.reopen()
        self.chunks.changed.fire()

    def _found(self, packet: Packet, shape: wire.PacketShape) -> SentChunk | None:
        """Returns a chunk that refers to the tensors of `packet` in the arena.

        Returns None if any tensor is not in the arena.
        """
        regions: dict[Region, None] = {}
        places: list[ArenaRange] = []
        for tensor in packet.tensors.values():
            found = self._arena.find(tensor)
            if found is not None:
                regions[found.region] = None
                places.append(ArenaRange(found.offset, tensor.nbytes, found.region.generation))
            elif tensor.nbytes:
                return None
            else:
                places.append(_NOWHERE)
        for region in regions:
            region.retain()
        return SentChunk(
            self.chunks.next_seq, shape, packet.tensors, packet.metadata, regions=tuple(regions), places=places
        )


class FanOut:
    """A group of zero or more outlets of one step. Sends each packet over all outlets of the group.

    A packet that several outlets send is written into the arena only once.
    """

    def __init__(self, *, arena: Arena, inline_limit_bytes: int) -> None:
        self._outlets: dict[Outlet, Select | None] = {}
        self._arena, self._account = arena, MemoryAccount()
        self._inline_limit_bytes = inline_limit_bytes

    def add(self, outlet: Outlet, select: Select | None = None) -> None:
        """Adds an outlet to the group. `select` returns the part of a packet that the outlet sends.

        If `select` is None, the outlet sends the whole packet.
        """
        self._outlets[outlet] = select

    @property
    def usages(self) -> list[request_pb2.EdgeUsage]:
        """The numbers of chunks and of payload bytes that each outlet has sent, in the order of the `add` calls."""
        return [outlet.usage for outlet in self._outlets]

    async def send(self, packet: Packet) -> None:
        """Sends a packet over every outlet. Raises the error of the first outlet that fails."""
        selected = self._selected(packet)
        if len(selected) > 1 and packet.size_bytes > self._inline_limit_bytes:
            names = {name for _, part in selected for name in part.tensors}
            tensors = {name: tensor for name, tensor in packet.tensors.items() if name in names}
            selected = self._selected(await self._placed(Packet(tensors, packet.metadata, packet.tickets)))
        waiting: list[tuple[Outlet, Packet]] = []
        for outlet, part in selected:
            if outlet.transform is None and outlet.has_credit(part.size_bytes):
                # This send does not wait for credit, and creating a task for it would cost more than the send.
                await outlet.send(part)
            else:
                waiting.append((outlet, part))
        await _run_together([outlet.send(part) for outlet, part in waiting])

    async def finish(self) -> None:
        """Finishes all outlets concurrently. Waits until all consumers have received all chunks.

        Raises the error of the first outlet that fails.
        """
        await _run_together([outlet.finish() for outlet in self._outlets])

    def _selected(self, packet: Packet) -> list[tuple[Outlet, Packet]]:
        """Returns the outlets that send a part of `packet`, each with the part that it sends."""
        selected = [(outlet, select(packet) if select else packet) for outlet, select in self._outlets.items()]
        return [(outlet, part) for outlet, part in selected if part is not None]

    async def _placed(self, packet: Packet) -> Packet:
        """Returns a packet with the content of `packet` and with all tensors in the arena.

        The arena region is retained until the packet's tensors and the chunks that refer to them are deleted.
        """
        if all(self._arena.find(tensor) for tensor in packet.tensors.values() if tensor.nbytes):
            return packet
        written = await self._arena.write(packet.tensors, self._account)
        return Packet(written.held(), packet.metadata, packet.tickets)


async def _run_together(sends: Sequence[Coroutine[object, object, None]]) -> None:
    """Runs all coroutines concurrently. If a coroutine raises an error, cancels the remaining coroutines.

    Raises that error itself, not an exception group.
    """
    if len(sends) < 2:
        for send in sends:
            await send
        return
    try:
        async with asyncio.TaskGroup() as group:
            for send in sends:
                group.create_task(send)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
