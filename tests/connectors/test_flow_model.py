"""Two data planes on a wire that loses, repeats and swaps messages and breaks, against a list of the sent packets.

Everything except the wire and the clock is real. The state machine decides when messages move and when time passes.
"""

import asyncio
import sys
from collections import deque
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.connectors import fragments, peer_timeouts
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow import inlet_attempt, outlet_attempt
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from stagemesh.rpc.message_streams import StreamHandler
from tests.connectors.contents import is_packet_of, packet_of
from tests.connectors.model_wires import Clock, Wire, WireEnd, close_all, model_settings, turns, use_wires
from tests.connectors.relay_faults import Direction

ARENA_BYTES = 128 << 10
WINDOW_BYTES = 32 << 10
LIMITS: dict[str, Any] = {"arena_bytes": ARENA_BYTES, "window_bytes": WINDOW_BYTES, "inline_limit_bytes": 64}
SIZES = [0, 10, 3000, 9000, 20_000, 31_000]
"""The sizes of packets in bytes. Two exceed half the window, and one needs nearly all of it."""
FLOWS = {"by shm": "shm", "by grpc": "grpc"}
NEVER_S = 1e9
DIRECTIONS = st.sampled_from(list(Direction))
REQUESTS = st.sampled_from(list(FLOWS))


class Flow:
    """Both ends of a flow, with the tasks that use them."""

    def __init__(self, machine: "DataPlaneModel", request: str) -> None:
        key = EdgeKey(request, "a->b", 1)
        self.request = request
        self.inlet: Inlet = machine.consumer.open_inlet(key, producer="a")
        self.outlet: Outlet = machine.producer.open_outlet(
            key, ConsumerAddress("b", "nowhere"), connector=FLOWS[request], policy=StepPolicy()
        )
        self.sizes: list[int] = []
        self.to_send: asyncio.Queue[int | None] = asyncio.Queue()
        self.read_count = 0
        self.held: deque[tuple[int, Packet]] = deque()
        self.permits = asyncio.Semaphore(0)
        self.tasks = [asyncio.create_task(self._send()), asyncio.create_task(self._receive())]

    async def _send(self) -> None:
        seq = 0
        while (size := await self.to_send.get()) is not None:
            await self.outlet.send(packet_of(self.request, seq, size))
            seq += 1
        await self.outlet.finish()

    async def _receive(self) -> None:
        while True:
            await self.permits.acquire()
            got = await anext(self.inlet, None)
            if got is None:
                await self.inlet.aclose()
                return
            self.held.append((self.read_count, got))
            self.read_count += 1
            del got

    def look(self) -> None:
        """Checks and releases the oldest packet that the reader keeps."""
        seq, packet = self.held.popleft()
        assert is_packet_of(packet, request=self.request, seq=seq, size_bytes=self.sizes[seq]), (
            f"packet {seq} {self.request} is not what was sent: {packet.metadata}, {packet.size_bytes} bytes"
        )


class DataPlaneModel(RuleBasedStateMachine):
    """The wire, the clock, and the producers and readers of two flows."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Clock()
        self.patches = pytest.MonkeyPatch()
        self.wires: list[Wire] = []

    @initialize()
    def begin(self) -> None:
        use_wires(self.patches, self._stream)
        self.patches.setattr(peer_timeouts, "LOST_CONSUMER_S", NEVER_S)
        self.patches.setattr(peer_timeouts, "LOST_PRODUCER_S", NEVER_S)
        self.patches.setattr(inlet_attempt, "MAX_RESYNCS", sys.maxsize)
        self.patches.setattr(outlet_attempt, "MAX_RESYNCS", sys.maxsize)
        self.patches.setattr(fragments, "FRAGMENT_BYTES", 4096)
        self.patches.setattr(fragments, "WHOLE_CHUNK_BYTES", 4096)
        self.loop.run_until_complete(self._begin())
        self._settle()

    async def _begin(self) -> None:
        self.producer = DataPlane(replica="a", pipeline="p", generation="g", **LIMITS)
        self.consumer = DataPlane(replica="b", pipeline="p", generation="g", **LIMITS)
        self.flows = {request: Flow(self, request) for request in FLOWS}

    # -- producers and readers

    @rule(request=REQUESTS, size=st.sampled_from(SIZES))
    def send(self, request: str, size: int) -> None:
        self.flows[request].sizes.append(size)
        self.flows[request].to_send.put_nowait(size)
        self._settle()

    @rule(request=REQUESTS, count=st.integers(1, 5))
    def read(self, request: str, count: int) -> None:
        for _ in range(count):
            self.flows[request].permits.release()
        self._settle()

    @rule(request=REQUESTS)
    def look(self, request: str) -> None:
        if self.flows[request].held:
            self.flows[request].look()
        self._settle()

    # -- the wire

    @rule(direction=DIRECTIONS, count=st.integers(1, 20))
    def deliver(self, direction: Direction, count: int) -> None:
        self.loop.run_until_complete(self._deliver(direction, count))

    async def _deliver(self, direction: Direction, count: int) -> None:
        for _ in range(count):
            if self._queue(direction):
                self.wires[-1].deliver(direction)
                await turns()

    @rule(direction=DIRECTIONS)
    def drop(self, direction: Direction) -> None:
        if self._queue(direction):
            self._queue(direction).popleft()

    @rule(direction=DIRECTIONS)
    def repeat(self, direction: Direction) -> None:
        if self._queue(direction):
            self._queue(direction).appendleft(self._queue(direction)[0])

    @rule(direction=DIRECTIONS, at=st.integers(1, 5))
    def delay(self, direction: Direction, at: int) -> None:
        """Delays the next message, so that others overtake it."""
        if self._queue(direction):
            self._queue(direction).insert(at, self._queue(direction).popleft())

    @precondition(lambda self: self.wires)
    @rule()
    def cut(self) -> None:
        self.wires[-1].over.set()
        self._settle()

    @rule(time_s=st.sampled_from([0.2, 1.0, 3.0]))
    def wait(self, time_s: float) -> None:
        self.loop.now_s += time_s
        self._settle()

    # -- invariants

    @invariant()
    def credit_is_kept(self) -> None:
        for flow in getattr(self, "flows", {}).values():
            assert flow.outlet.chunks.sent_bytes <= max(flow.outlet.attempt.credit.size_bytes, WINDOW_BYTES)
            credit = flow.inlet.attempt._credit
            assert credit.received_bytes - credit._consumed_bytes <= WINDOW_BYTES
            assert flow.read_count <= len(flow.sizes)

    @invariant()
    def no_flow_failed(self) -> None:
        for flow in getattr(self, "flows", {}).values():
            for task in flow.tasks:
                if task.done():
                    task.result()

    def teardown(self) -> None:
        try:
            self._deliver_the_rest()
        finally:
            self.loop.run_until_complete(self._close())
            self.patches.undo()
            self.loop.close()
        assert self.producer.arena.used_bytes == 0
        assert [flow.outlet._account.held_bytes for flow in self.flows.values()] == [0, 0]

    def _deliver_the_rest(self) -> None:
        for flow in self.flows.values():
            flow.to_send.put_nowait(None)
        for _ in range(400):
            self._deliver_everything()
            if all(task.done() for flow in self.flows.values() for task in flow.tasks):
                break
            self.wait(1.0)
        for flow in self.flows.values():
            assert [task.done() for task in flow.tasks] == [True, True], f"{flow.request} makes no progress"
            assert flow.read_count == len(flow.sizes)
            assert flow.inlet.attempt.is_read
        self.no_flow_failed()
        # Leases that lost messages granted are returned with the next connection.
        self.cut()
        self.wait(1.0)
        self._deliver_everything()

    def _deliver_everything(self) -> None:
        for _ in range(3):
            for direction in Direction:
                self.deliver(direction, len(self._queue(direction)))
            for flow in self.flows.values():
                self.read(flow.request, 50)
                while flow.held:
                    flow.look()
        self._settle()

    async def _close(self) -> None:
        for flow in self.flows.values():
            flow.held.clear()
        await close_all((self.producer, self.consumer))

    # -- inner workings

    def _queue(self, direction: Direction) -> deque[bytes]:
        return self.wires[-1].queues[direction] if self.wires else deque()

    def _stream(self, channel: str, user: StreamHandler, *, peer: str) -> WireEnd:
        self.wires.append(Wire(self.consumer, user, arena_fd=self.producer.arena.fd))
        return WireEnd(self.wires[-1], Direction.REQUESTS)

    def _settle(self) -> None:
        self.loop.run_until_complete(turns())


TestDataPlane = DataPlaneModel.TestCase
TestDataPlane.settings = model_settings(examples=40, steps=60)


class LongDataPlaneModel(DataPlaneModel):
    """The model at the length of a soak test."""


TestDataPlaneAtLength = pytest.mark.soak(pytest.mark.timeout(600)(LongDataPlaneModel.TestCase))
TestDataPlaneAtLength.settings = model_settings(examples=300, steps=100)
