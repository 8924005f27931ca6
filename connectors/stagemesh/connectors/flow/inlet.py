"""The consuming end of an edge whose producer may be replaced: what was taken of one is not taken of the next."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping

from stagemesh.common.errors import StagemeshError, StaleAttemptError
from stagemesh.common.notifier import Notifier
from stagemesh.connectors.edge import FlowStatus, Packet
from stagemesh.connectors.flow.inlet_attempt import InletAttempt
from stagemesh.connectors.flow.reconnect_policy import REBIND_S, mendable
from stagemesh.connectors.flow.row_position import RowPosition


class RebindingInlet:
    """Implements `Inlet`: a series of flows, of which each goes on where the one before it stood, by rows.

    A reader that meets the end of a lost flow waits for another one, up to REBIND_S.
    """

    def __init__(self, flow: InletAttempt) -> None:
        self._flow = flow
        self._rows = RowPosition(edge=flow.key.edge)
        self._kept: deque[Packet] = deque()
        """What had arrived of former flows."""
        self._ended = False
        """Whether nothing comes after what is kept."""
        self._closed = False
        self._changed = Notifier()

    def __aiter__(self) -> AsyncIterator[Packet]:
        """See `Inlet`."""
        return self

    async def __anext__(self) -> Packet:
        """The next packet; not a generator, whose frame would hold on to the last one and so to its lease."""
        while True:
            if self._kept:
                return self._kept.popleft()
            if self._ended:
                raise StopAsyncIteration
            packet = await self._next_of(self._flow)
            if packet is not None:
                return packet

    @property
    def standing(self) -> FlowStatus:
        """See `Inlet`."""
        return self._flow.standing

    @property
    def is_lost(self) -> bool:
        """Whether the present flow has failed."""
        return self._flow.error is not None

    async def aclose(self, *, lost: bool = False) -> None:
        """See `Inlet`."""
        self._closed = True
        self._kept.clear()
        if not self._ended or self._flow.complete:
            await self._flow.aclose(lost=lost)

    def check(self, first_rows: Mapping[str, int]) -> None:
        """Raises NotReadyError (ROWS_MISSING) where a flow that begins there would leave rows out."""
        if not self._ended and not self._flow.ended:
            self._rows.check(first_rows)

    def rebind(self, open_flow: Callable[[], InletAttempt], *, first_rows: Mapping[str, int]) -> None:
        """Goes on with another producer, whose flow begins at `first_rows`; `check` comes first."""
        former = self._flow
        self._ended = self._ended or former.ended
        self._keep(former)
        self._flow = open_flow()
        if self._ended:
            # All of the edge is here already; its new producer is to come to its end none the less.
            self._flow.discard()
        else:
            self._rows.begin(first_rows)
        self._changed.fire()

    # -- inner workings

    def _keep(self, former: InletAttempt) -> None:
        """Takes over what has arrived and was not read; whoever still sends is told to stop."""
        for packet in former.surrender(StaleAttemptError(f"edge {former.key.edge} has another producer")):
            new = self._rows.take(packet)
            if new is not None:
                self._kept.append(new)

    async def _next_of(self, flow: InletAttempt) -> Packet | None:
        """The next packet of a flow; None where there is nothing new in it, or another flow has taken over."""
        try:
            return self._rows.take(await anext(flow))
        except StopAsyncIteration:
            self._rows.check_end()
            self._ended = True
            return None
        except StagemeshError as exc:
            if flow is self._flow and not mendable(exc):
                raise
            error = exc
        if flow is self._flow:
            await self._rebound(flow, error)
        return None

    async def _rebound(self, flow: InletAttempt, error: StagemeshError) -> None:
        try:
            async with asyncio.timeout(REBIND_S):
                while self._flow is flow:
                    await self._changed.wait()
        except TimeoutError:
            raise error from None
