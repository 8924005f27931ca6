"""The producing end of an edge whose consumer may be replaced: the next one is sent all chunks from the first on."""

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from copy import copy
from functools import partial

from stagemesh.common.errors import (
    CancelledRequestError,
    InternalError,
    NotReadyError,
    StagemeshError,
    StaleAttemptError,
)
from stagemesh.common.notifier import Notifier
from stagemesh.connectors.edge import ChunkPolicy, FlowStatus, FlowUsage, Packet
from stagemesh.connectors.flow.chunking import Chunker
from stagemesh.connectors.flow.outlet_attempt import OutletAttempt
from stagemesh.connectors.flow.reconnect_policy import REBIND_S, mendable
from stagemesh.connectors.flow.sent_chunk import SentChunk

_log = logging.getLogger(__name__)


class RebindingOutlet:
    """Implements `Outlet`: a series of flows, each with what those before it carried.

    Packets are cut here, once, so that every consumer gets the same chunks; the flows send what they are given. What a
    flow kept goes over to its successor and is sent again by a task of its own, before anything new. A flow whose
    consumer is gone keeps its chunks for REBIND_S.
    """

    def __init__(self, flow: OutletAttempt, *, policy: ChunkPolicy, on_over: Callable[[], None] = lambda: None) -> None:
        """`on_over` is told once nobody can be sent anything any more: all is committed, or it cannot be mended."""
        self._chunker = Chunker(policy)
        self._on_over: Callable[[], None] | None = on_over
        self._backlog: deque[SentChunk] = deque()
        self._replaying: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._finished = self._released = False
        self._error: StagemeshError | None = None
        self._changed = Notifier()
        self._flow = self._watched(flow)

    @property
    def usage(self) -> FlowUsage:
        """See `Outlet`: what the present flow has sent, which at its end is all."""
        return self._flow.usage

    @property
    def standing(self) -> FlowStatus:
        """See `Outlet`."""
        return self._flow.standing

    @property
    def is_over(self) -> bool:
        """Whether nobody can be sent anything any more."""
        return self._on_over is None

    @property
    def is_lost(self) -> bool:
        """Whether the present flow has failed."""
        return self._flow.error is not None

    async def send(self, packet: Packet) -> None:
        """See `Outlet`."""
        for chunk in self._chunker.push(packet):
            await self._send(chunk)

    async def finish(self) -> None:
        """See `Outlet`."""
        for chunk in self._chunker.finish():
            await self._send(chunk)
        while True:
            flow = await self._settled()
            try:
                await flow.finish()
            except StagemeshError:
                if self._is_final(flow):
                    raise
                continue
            self._finished = True
            return

    async def abort(self, error: StagemeshError) -> None:
        """See `Outlet`."""
        replaying = self._replaying
        self.release(error)
        if replaying is not None:
            await asyncio.gather(replaying, return_exceptions=True)

    def release(self, error: StagemeshError) -> None:
        """What `abort` does, without a wait. After `finish` it only has no other consumer take this one's place."""
        if self._released:
            return
        self._released = True
        self._end(CancelledRequestError(f"edge {self._flow.key.edge} was aborted: {error.message}", reason="ABORTED"))
        if self._replaying is not None:
            self._replaying.cancel()
        self._flow.on_over = None
        if self._flow.error is not None:
            self._flow.let_go()
        else:
            self._flow.break_off(error)

    def check(self) -> None:
        """Raises NotReadyError (CHUNK_GONE) where another consumer could not be sent all."""
        if self.is_over or not self._flow.keeps_all:
            edge = self._flow.key.edge
            raise NotReadyError(
                f"the first chunks of edge {edge} are kept no more; run its producer again",
                reason="CHUNK_GONE",
                metadata={"edge": edge},
            )

    def rebind(self, open_flow: Callable[[], OutletAttempt]) -> None:
        """Goes on with another consumer, who gets all from the first chunk on; `check` comes first."""
        former, replaying = self._flow, self._replaying
        former.on_over = None
        if replaying is not None:
            replaying.cancel()
        self._stop_waiting()
        replaced = StaleAttemptError(f"edge {former.key.edge} has another consumer")
        self._backlog.extendleft(reversed(former.surrender(replaced)))
        # After that: it may be a flow of the same key over the same link.
        self._flow = self._watched(open_flow())
        self._replaying = asyncio.create_task(self._replay(replaying), name=f"replay of {former.key.edge}")
        self._changed.fire()

    # -- inner workings

    async def _send(self, chunk: Packet) -> None:
        while True:
            flow = await self._settled()
            try:
                await flow.send(chunk)
            except StagemeshError:
                if self._is_final(flow):
                    raise
                continue
            return

    async def _settled(self) -> OutletAttempt:
        """The present flow, once it has all that its predecessors had; raises what cannot be mended."""
        while self._error is not None or self._replaying is not None or self._flow.error is not None:
            if self._error is not None:
                raise copy(self._error)
            await self._changed.wait()
        return self._flow

    def _is_final(self, flow: OutletAttempt) -> bool:
        """Whether what a flow raised is not for another to mend."""
        return flow is self._flow and (flow.error is None or self._error is not None)

    async def _replay(self, former: "asyncio.Task[None] | None") -> None:
        flow = self._flow
        try:
            if former is not None:
                await asyncio.wait((former,))
            while self._backlog:
                sent = self._backlog[0]
                assert sent.tensors is not None, "what is surrendered is kept"
                await flow.send(Packet(sent.tensors, sent.metadata or {}))
                self._backlog.popleft().let_go()
            if self._finished:
                await flow.finish()
        except StagemeshError as exc:
            # Where the flow itself has failed, that is known.
            flow.fail(exc)
        except Exception as exc:  # noqa: BLE001 - the task's outermost edge
            _log.exception("what edge %s had carried could not be sent again", flow.key.edge)
            flow.fail(InternalError(f"edge {flow.key.edge} could not be sent again: {exc!r}"))
        finally:
            if self._replaying is asyncio.current_task():
                self._replaying = None
                self._changed.fire()

    def _watched(self, flow: OutletAttempt) -> OutletAttempt:
        flow.on_over = partial(self._flow_over, flow)
        return flow

    def _flow_over(self, flow: OutletAttempt, error: StagemeshError | None) -> bool:
        """See `OutletAttempt.on_over`."""
        if flow is not self._flow or self.is_over:
            return False
        if error is not None and mendable(error):
            self._timer = asyncio.get_running_loop().call_later(REBIND_S, self._give_up, error)
            self._changed.fire()
            return True
        self._end(error)
        return False

    def _give_up(self, error: StagemeshError) -> None:
        self._flow.let_go()
        self._end(error)

    def _end(self, error: StagemeshError | None) -> None:
        self._stop_waiting()
        self._error = self._error or error
        while self._backlog:
            self._backlog.popleft().let_go()
        on_over, self._on_over = self._on_over, None
        self._changed.fire()
        if on_over is not None:
            on_over()

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
