"""The consumer side of a flow, and the reading of several flows at once.

An inlet delivers the packets of successive attempts to an engine exactly once and in order.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from copy import copy

from stagemesh.common.errors import CancelledRequestError, StagemeshError, UnavailableError
from stagemesh.common.plugins.connectors import AUTO, number_of
from stagemesh.common.tasks import end_tasks
from stagemesh.connectors.flow.inlet_attempt import InletAttempt, Phase
from stagemesh.connectors.packets import Packet
from stagemesh.connectors.peer_timeouts import NOT_READ, is_recoverable
from stagemesh.v1 import control_pb2


class Inlet:
    """The consumer side of a flow. One task iterates over the inlet. The inlet yields each packet once and in order.

    If the producer becomes unreachable, another producer can replace it within `rebind_s` seconds. The inlet then drops
    the rows that have already arrived from the previous producer.
    """

    def __init__(self, attempt: "InletAttempt", *, rebind_s: float = 0.0) -> None:
        self.attempt = attempt
        self._rebind_s = rebind_s
        self._packets = attempt.packets

    def __aiter__(self) -> AsyncIterator[Packet]:
        """Returns this inlet. An inlet has only one iteration, because a flow can be read only once."""
        return self

    async def __anext__(self) -> Packet:
        """Returns the next packet. Waits until a packet arrives.

        Raises StopAsyncIteration after the last packet. Raises the flow's error if the producer aborts the flow, or if
        the producer becomes unreachable and no other producer replaces it.
        """
        # Not a generator, because its frame would retain the last packet and its lease.
        packets = self._packets
        while not packets.waiting:
            attempt = self.attempt
            if packets.has_ended:
                if attempt.phase is Phase.ENDED:
                    attempt.is_read = True
                raise StopAsyncIteration
            if attempt.error is None:
                await packets.changed.wait()
            else:
                await self._wait_for_successor(attempt, attempt.error)
        return packets.pop()

    def report(self, *, producer: str = "") -> control_pb2.FlowReport:
        """Returns a snapshot of the flow's progress, as seen by the consumer. `producer` is the producer's name."""
        attempt, packets = self.attempt, self._packets
        return control_pb2.FlowReport(
            edge=attempt.key.edge,
            peer=producer,
            connector=number_of(attempt.connector if attempt.incarnation else AUTO),
            connected=attempt.queue is not None,
            chunks=attempt.next_seq,
            waiting_chunks=packets.waiting,
            waiting_bytes=packets.waiting_bytes,
            credit_bytes=attempt.credit_bytes,
            ended=packets.has_ended,
            handed_over_bytes=packets.handed_over_bytes,
        )

    @property
    def is_lost(self) -> bool:
        """Whether the current attempt has failed."""
        return self.attempt.error is not None

    async def aclose(self, *, lost: bool = False) -> None:
        """Rejects further packets and releases the packets that have arrived but have not been read. Idempotent.

        Args:
            lost: Whether to report this consumer as unavailable, so that another consumer can replace it.
        """
        self._packets.clear()
        if self.attempt.is_discarding:
            # The attempt commits and closes by itself when all chunks have arrived.
            return
        edge = self.attempt.key.edge
        if lost:
            error: StagemeshError = UnavailableError(f"the consumer of edge {edge} has ended", reason="PEER_LOST")
        else:
            error = CancelledRequestError(f"the consumer of edge {edge} stopped reading", reason=NOT_READ)
        self.attempt.close(error)

    def leave(self) -> None:
        """Discards the packets that have not been read. The flow then ends by itself when its producer has finished.

        Call `aclose` afterwards.
        """
        self._packets.clear()
        attempt = self.attempt
        if attempt.phase is Phase.ENDED:
            attempt.is_read = True
        elif attempt.error is None and not attempt.is_closed:
            attempt.discard()

    def check_rebindable(self, first_rows: Mapping[str, int]) -> None:
        """Raises NotReadyError (ROWS_MISSING) if a producer that begins at `first_rows` would omit rows that are
        needed.

        `first_rows` maps each tensor's name to the first row that the producer would send.
        """
        if not self._packets.has_ended:
            self._packets.check_rows(first_rows)

    def rebind(self, attempt: "InletAttempt", *, first_rows: Mapping[str, int]) -> None:
        """Continues the flow with the producer of `attempt`. Packets that have arrived remain readable.

        `first_rows` maps each tensor's name to the first row that this producer sends. Call `check_rebindable` first,
        and supersede the previous attempt.
        """
        self.attempt = attempt
        if self._packets.has_ended:
            # All packets have arrived, but the new producer must still be able to finish its flow.
            attempt.discard()
        else:
            self._packets.begin(first_rows)
        self._packets.changed.fire()

    async def _wait_for_successor(self, attempt: "InletAttempt", error: StagemeshError) -> None:
        """Waits until another attempt has replaced `attempt`.

        Raises `error` if no attempt replaces it within `rebind_s` seconds, or immediately if the error is not
        recoverable.
        """
        # Raises a copy, because a raised error references frames, which reference packets and their leases.
        if not self._rebind_s or not is_recoverable(error):
            raise copy(error)
        try:
            async with asyncio.timeout(self._rebind_s):
                while self.attempt is attempt:
                    await self._packets.changed.wait()
        except TimeoutError:
            raise copy(error) from None


async def merge(sources: Sequence[AsyncIterator[Packet]]) -> AsyncGenerator[Packet, None]:
    """Yields the packets of all sources in arrival order. Reads at most one packet ahead from each source.

    Iterate within `contextlib.aclosing`, which stops the tasks that read from the sources. Raises the first error of a
    source.
    """
    if len(sources) == 1:
        async for only in sources[0]:
            yield only
        return
    reading = {asyncio.ensure_future(anext(source, None)): source for source in sources}
    try:
        while reading:
            await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            # Packets are processed one at a time, because a packet may have a lease and must not be retained after use.
            task = next(task for task in reading if task.done())
            source = reading.pop(task)
            packet = task.result()
            if packet is not None:
                reading[asyncio.ensure_future(anext(source, None))] = source
                yield packet
            del packet, task
    finally:
        await end_tasks(reading)
