"""The consuming end of a flow: a series of attempts, whose packets an engine reads each once and in order."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from copy import copy

from stagemesh.common.connector_descriptors import AUTO
from stagemesh.common.errors import CancelledRequestError, StagemeshError, UnavailableError
from stagemesh.connectors.edge import NOT_READ, PEER_LOST, FlowStatus, Packet, is_recoverable
from stagemesh.connectors.flow.inlet_attempt import InletAttempt, Phase


class Inlet:
    """The consuming end of a flow, iterated over by one task. Its packets are in order, each once, up to End.

    If the producer is lost, another one may take its place within `rebind_s`. Its flow continues where the edge stands,
    counted in rows: rows that have arrived before are dropped.
    """

    def __init__(self, attempt: InletAttempt, *, rebind_s: float = 0.0) -> None:
        self.attempt = attempt
        self._rebind_s = rebind_s
        self._packets = attempt.packets

    def __aiter__(self) -> AsyncIterator[Packet]:
        """Returns itself: a flow is read once."""
        return self

    async def __anext__(self) -> Packet:
        """Returns the next packet. Raises the error of an Abort or of a lost producer."""
        # Not a generator, whose frame would retain the last packet and so its lease.
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

    @property
    def status(self) -> FlowStatus:
        """The present state."""
        attempt, packets = self.attempt, self._packets
        return FlowStatus(
            edge=attempt.key.edge,
            connector=attempt.connector if attempt.incarnation else AUTO,
            connected=attempt.is_connected,
            chunks=attempt.next_seq,
            waiting_chunks=packets.waiting,
            waiting_bytes=packets.waiting_bytes,
            credit_bytes=attempt.credit_bytes,
            wanted_bytes=0,
            ended=packets.has_ended,
        )

    @property
    def is_lost(self) -> bool:
        """Whether the present attempt has failed."""
        return self.attempt.error is not None

    async def aclose(self, *, lost: bool = False) -> None:
        """Rejects further packets and releases those that have arrived. Closing twice is harmless.

        Args:
            lost: Tells the producer that this consumer is lost, so that another consumer may be bound.
        """
        self._packets.clear()
        if self.attempt.is_discarding:
            # It commits and closes when it has arrived completely.
            return
        edge = self.attempt.key.edge
        if lost:
            error: StagemeshError = UnavailableError(f"the consumer of edge {edge} is gone", reason=PEER_LOST)
        else:
            error = CancelledRequestError(f"the consumer of edge {edge} stopped reading", reason=NOT_READ)
        self.attempt.close(error)

    def check_rebindable(self, first_rows: Mapping[str, int]) -> None:
        """Raises NotReadyError (ROWS_MISSING) if a flow that begins at `first_rows` would leave rows out."""
        if not self._packets.has_ended:
            self._packets.rows.check(first_rows)

    def rebind(self, attempt: InletAttempt, *, first_rows: Mapping[str, int]) -> None:
        """Continues with another producer, whose flow begins at `first_rows`. Call `check_rebindable` first.

        The former attempt must be superseded. Packets that have arrived are still to be read.
        """
        self.attempt = attempt
        if self._packets.has_ended:
            # Everything has arrived. The new producer must reach its end nevertheless.
            attempt.discard()
        else:
            self._packets.rows.begin(first_rows)
        self._packets.changed.fire()

    async def _wait_for_successor(self, attempt: InletAttempt, error: StagemeshError) -> None:
        """Returns when another attempt has taken the place of `attempt`; raises its error if none does."""
        # A copy, because a raised error refers to frames, and they refer to packets and their leases.
        if not self._rebind_s or not is_recoverable(error):
            raise copy(error)
        try:
            async with asyncio.timeout(self._rebind_s):
                while self.attempt is attempt:
                    await self._packets.changed.wait()
        except TimeoutError:
            raise copy(error) from None
