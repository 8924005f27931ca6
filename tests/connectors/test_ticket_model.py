"""The ledger of tickets, against a model of the engines that read states: no double release, no leak, no late use.

A producer sends tickets to two consumers. Everything except the wires and the clock is real. The state machine decides
when messages move, break off and repeat, when time passes, and when a replica dies, restarts or becomes unreachable.
"""

import asyncio
import gc
import itertools
from collections import Counter, deque
from collections.abc import Callable, Collection, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from stagemesh.common.errors import InternalError, StagemeshError, UnavailableError
from stagemesh.common.plugins.connectors import GRPC
from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.flow.sent_chunks import Leases
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, OfferedTicket, Packet, Ticket
from stagemesh.rpc.message_streams import StreamHandler
from tests.connectors.model_wires import Clock, Wire, WireEnd, close_all, model_settings, turns, use_wires
from tests.connectors.relay_faults import Direction

CONSUMERS = ("b", "c")
KIND = "test.state"
REBIND_S = 15.0
LIMITS: dict[str, Any] = {"arena_bytes": 1 << 20, "inline_limit_bytes": 4096}
FLOW = USE = st.integers(0, 7)
LIMIT_S = st.sampled_from([3.0, 20.0, 100.0])
NAME = st.sampled_from(CONSUMERS)


class NoWire:
    """A connection that cannot be made."""

    is_writable = True

    def __init__(self, user: StreamHandler) -> None:
        self._user = user

    def write(self, data: bytes) -> None:
        pass

    def close(self, error: StagemeshError | None = None) -> None:
        self._user.closed(UnavailableError("unreachable"))

    async def run(self) -> None:
        self.close()


@dataclass
class State:
    """State of the producer's engine. `incarnation` is the number of the producer's process that keeps it."""

    name: str
    incarnation: int
    releases: int = 0


@dataclass(eq=False)
class Use:
    """A ticket that the engine of a consumer has. The engine reads the state from an acceptance until `until_s`."""

    state: State
    ticket: Ticket
    consumer: str
    until_s: float = 0.0


@dataclass(eq=False)
class Flow:
    """A flow to a consumer, with the tasks that use it."""

    outlet: Outlet
    incarnation: int
    consumer: str
    inlet: Inlet
    number: int
    attempt: int = 1
    is_finishing: bool = False
    permits: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Excludes the objects that former tests left from garbage collection, which the model requests very often."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


class TicketModel(RuleBasedStateMachine):
    """The producer, the consumers and their engines."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = Clock()
        self.patches = pytest.MonkeyPatch()
        self.incarnation = 0
        self.planes: dict[str, DataPlane] = {}
        self.wires: dict[str, Wire] = {}
        self.unreachable: set[str] = set()
        self.flows: list[Flow] = []
        self.states: dict[str, State] = {}
        self.uses: list[Use] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self.numbers = itertools.count(1)
        self.refusals = Counter[str]()
        self.abandoned: set[str] = set()
        """The names of states that unreachable consumers may still read, which are kept until their time limit."""

    @initialize()
    def begin(self) -> None:
        use_wires(self.patches, self._stream)
        self.patches.setattr(Leases, "end_unreachable", self._noting_abandoned(Leases.end_unreachable))
        self.loop.run_until_complete(self._begin())

    async def _begin(self) -> None:
        self._start_producer()
        for name in CONSUMERS:
            self.planes[name] = _plane(name)

    @rule(name=NAME, companions=st.integers(1, 3), time_limit_s=LIMIT_S, accept=st.booleans())
    def hand_over(self, name: str, companions: int, time_limit_s: float, accept: bool) -> None:
        """Hands tickets over to a consumer's engine, which may accept them. Their flow remains open."""
        self.unreachable.discard(name)
        self._advance(0.3)
        self.open(name)
        self.send(-1, None, companions, time_limit_s)
        self.flows[-1].permits.release()
        self.deliver_all(4)
        if accept:
            self.accept(-1, deliver=True)

    def _start_producer(self) -> None:
        self.incarnation += 1
        self.planes["a"] = _plane("a")

    # -- the producer

    @rule(name=NAME)
    def open(self, name: str) -> None:
        self._run(self._open(name))

    async def _open(self, name: str) -> None:
        number = next(self.numbers)
        inlet, key = self._expect(number, name, attempt=1), EdgeKey(f"r{number}", "a->", 1)
        outlet = self.planes["a"].open_outlet(
            key, ConsumerAddress(name, f"{name}:1"), connector=GRPC, policy=StepPolicy(), rebind_s=REBIND_S
        )
        flow = Flow(outlet, self.incarnation, name, inlet, number)
        self.flows.append(flow)
        self._spawn(self._read(flow, inlet, name))

    @rule(at=FLOW, also=st.none() | FLOW, companions=st.integers(1, 3), time_limit_s=LIMIT_S)
    def send(self, at: int, also: int | None, companions: int, time_limit_s: float) -> None:
        """Sends a packet with tickets over one flow, or over two."""
        self._run(self._send(at, also, companions, time_limit_s))

    async def _send(self, at: int, also: int | None, companions: int, time_limit_s: float) -> None:
        flows = {self._flow(each) for each in (at, also) if each is not None}
        flows = {each for each in flows if self._is_open(each)}
        if not flows:
            return
        tickets = {f"s{companion}": self._offer(time_limit_s) for companion in range(companions)}
        fan_out = self.planes["a"].fan_out()
        for flow in flows:
            assert flow is not None
            fan_out.add(flow.outlet)
        self._spawn(_send(fan_out.send(Packet({}, tickets=tickets)), list(tickets.values())))

    def _offer(self, time_limit_s: float) -> OfferedTicket:
        state = State(f"state {next(self.numbers)}", self.incarnation)
        self.states[state.name] = state

        def release() -> None:
            state.releases += 1

        return OfferedTicket(KIND, state.name.encode(), size_bytes=1, time_limit_s=time_limit_s, on_release=release)

    @rule(at=FLOW, name=NAME, event=st.sampled_from(["finish", "abort", "rebind", "rebind", "stop", "lose"]))
    def end_or_move(self, at: int, name: str, event: str) -> None:
        """Ends a flow at one of its ends, or moves it to another consumer or to the same one again."""
        flow = self._flow(at)
        if flow is not None:
            self._run(self._end_or_move(flow, name, event))

    async def _end_or_move(self, flow: Flow, name: str, event: str) -> None:
        if event in {"stop", "lose"}:
            await flow.inlet.aclose(lost=event == "lose")
        elif flow.incarnation == self.incarnation:
            match event:
                case "abort":
                    flow.is_finishing = True
                    flow.outlet.abort(InternalError("the engine failed"))
                case "rebind":
                    await self._rebind(flow, name)
                case _ if not flow.is_finishing:
                    flow.is_finishing = True
                    self._spawn(flow.outlet.finish())

    async def _rebind(self, flow: Flow, name: str) -> None:
        with suppress(StagemeshError):
            flow.outlet.check_rebindable()
            await flow.inlet.aclose(lost=True)
            flow.attempt += 1
            flow.consumer, flow.inlet = name, self._expect(flow.number, name, attempt=flow.attempt)
            key = EdgeKey(f"r{flow.number}", "a->", flow.attempt)
            self.planes["a"].rebind_outlet(
                flow.outlet, key, consumer=ConsumerAddress(name, f"{name}:1"), connector=GRPC
            )
            self._spawn(self._read(flow, flow.inlet, name))

    # -- the consumers and their engines

    def _expect(self, number: int, name: str, *, attempt: int) -> Inlet:
        key = EdgeKey(f"r{number}", "a->", attempt)
        return self.planes[name].open_inlet(key, producer="a", ticket_kinds=(KIND,))

    async def _read(self, flow: Flow, inlet: Inlet, name: str) -> None:
        while True:
            await flow.permits.acquire()
            packet = await anext(inlet, None)
            if packet is None:
                await inlet.aclose()
                return
            self.uses += [Use(self.states[each.descriptor.decode()], each, name) for each in packet.tickets.values()]
            del packet

    @rule(at=FLOW, count=st.integers(1, 3))
    def read(self, at: int, count: int) -> None:
        flow = self._flow(at)
        if flow is not None:
            for _ in range(count):
                flow.permits.release()
            self._settle()

    @rule(at=USE, deliver=st.booleans())
    def accept(self, at: int, deliver: bool) -> None:
        if self.uses:
            self._run(self._begin_to_accept(self.uses[at % len(self.uses)]))
            if deliver:
                self.deliver_all(2)

    async def _begin_to_accept(self, use: Use) -> None:
        self._spawn(self._accept(use))

    async def _accept(self, use: Use) -> None:
        try:
            until_s = await use.ticket.accept()
        except UnavailableError as exc:
            self.refusals[exc.reason] += 1
        else:
            use.until_s = max(use.until_s, until_s)

    @rule(at=USE, drop=st.booleans())
    def release(self, at: int, drop: bool) -> None:
        """Ends the use of a ticket, by a call or by dropping it."""
        if self.uses:
            use = self.uses.pop(at % len(self.uses))
            if not drop:
                use.ticket.release()
            del use
            gc.collect(0)
            self._settle()

    # -- deaths

    @rule(name=NAME, event=st.sampled_from(["cut", "cut", "partition", "partition", "kill consumer", "kill producer"]))
    def disturb(self, name: str, event: str) -> None:
        """Breaks a connection, separates or reconnects a consumer, or kills an end, which then restarts."""
        self._run(self._disturb(name, event))

    async def _disturb(self, name: str, event: str) -> None:
        match event:
            case "cut":
                self._cut(name)
            case "partition":
                self.unreachable ^= {name}
                self._cut(name)
            case "kill consumer":
                self._cut(name)
                self.uses = [use for use in self.uses if use.consumer != name]
                await self.planes[name].close()
                self.planes[name] = _plane(name)
            case _:
                for each in CONSUMERS:
                    self._cut(each)
                await turns()
                await self.planes["a"].close()
                self._start_producer()

    # -- the wires

    @rule(name=NAME, direction=st.sampled_from(list(Direction)), count=st.integers(1, 20))
    def deliver(self, name: str, direction: Direction, count: int) -> None:
        self._run(self._deliver(name, direction, count))

    async def _deliver(self, name: str, direction: Direction, count: int) -> None:
        for _ in range(count):
            if self._queue(name, direction):
                try:
                    self.wires[name].deliver(direction)
                except StagemeshError:
                    self.wires[name].over.set()
                await turns()

    @rule(count=st.integers(1, 4))
    def deliver_all(self, count: int) -> None:
        for _ in range(count):
            for name in CONSUMERS:
                for direction in Direction:
                    self.deliver(name, direction, 30)

    @rule(name=NAME, direction=st.sampled_from(list(Direction)), lost=st.booleans())
    def lose_or_repeat(self, name: str, direction: Direction, lost: bool) -> None:
        """Loses the next message, or delivers it twice."""
        queue = self._queue(name, direction)
        if queue and lost:
            queue.popleft()
        elif queue:
            queue.appendleft(queue[0])

    def _cut(self, name: str) -> None:
        if name in self.wires:
            self.wires[name].over.set()
            self.wires[name].end()

    @rule(time_s=st.sampled_from([0.2, 1.0, 3.0, 16.0, 50.0]))
    def wait(self, time_s: float) -> None:
        self._advance(time_s)

    # -- invariants

    @invariant()
    def nothing_is_released_twice(self) -> None:
        assert all(state.releases <= 1 for state in self.states.values())

    @invariant()
    def nothing_is_used_after_its_release(self) -> None:
        for use in self.uses:
            if use.until_s > self.loop.now_s and use.state.incarnation == self.incarnation:
                assert use.state.releases == 0, f"{use.state.name} was released while {use.consumer} read it"

    @invariant()
    def refusals_have_their_reasons(self) -> None:
        assert self.refusals.keys() <= {"TICKET_EXPIRED", "TICKET_LOST"}

    @invariant()
    def no_task_failed(self) -> None:
        for task in [each for each in self.tasks if each.done()]:
            self.tasks.discard(task)
            task.result()

    def teardown(self) -> None:
        try:
            if self.planes:
                self._end_everything()
        finally:
            self._run(close_all(self.planes.values()))
            self.patches.undo()
            self.loop.close()

    def _end_everything(self) -> None:
        """Ends all uses and flows. Every state of the living producer must then be released, within its time limit."""
        self.unreachable.clear()
        self.uses.clear()
        gc.collect()
        for at, flow in enumerate(self.flows):
            self.end_or_move(at, flow.consumer, "abort")
            self.end_or_move(at, flow.consumer, "stop")
        for name in CONSUMERS:
            # Leases whose messages were lost end with the next connection.
            self._deliver_the_rest()
            self.disturb(name, "cut")
        self._deliver_the_rest()
        for plane in self.planes.values():
            for link in plane._links.values():
                assert not link.leases, "a lease is left"
            for producer in plane.consumer._producers.values():
                assert not producer.held_lease_ids
        self._check_released(except_names=self.abandoned)
        self._advance(150.0)
        self._check_released()
        self.no_task_failed()

    def _check_released(self, except_names: Collection[str] = ()) -> None:
        for state in self.states.values():
            if state.incarnation == self.incarnation and state.name not in except_names:
                assert state.releases == 1, f"{state.name} was released {state.releases} times"

    def _noting_abandoned(self, end: Callable[[Leases], None]) -> Callable[[Leases], None]:
        def end_unreachable(leases: Leases) -> None:
            for lease in leases._tickets.values():
                self.abandoned |= {ticket.descriptor.decode() for ticket in lease.chunk.offered}
            end(leases)

        return end_unreachable

    def _deliver_the_rest(self) -> None:
        for _ in range(20):
            self.deliver_all(2)
            self._advance(1.0)

    # -- inner workings

    def _flow(self, at: int) -> Flow | None:
        return self.flows[at % len(self.flows)] if self.flows else None

    def _is_open(self, flow: Flow | None) -> TypeGuard[Flow]:
        return flow is not None and flow.incarnation == self.incarnation and not flow.is_finishing

    def _queue(self, name: str, direction: Direction) -> deque[bytes]:
        return self.wires[name].queues[direction] if name in self.wires else deque()

    def _stream(self, channel: str, user: StreamHandler, *, peer: str) -> WireEnd | NoWire:
        name = channel.partition(":")[0]
        if name in self.unreachable:
            return NoWire(user)
        self._cut(name)
        self.wires[name] = Wire(self.planes[name], user)
        return WireEnd(self.wires[name], Direction.REQUESTS)

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        """Runs a task of an engine, which may fail with the error of its flow."""
        self.tasks.add(asyncio.create_task(_tolerant(work)))

    def _advance(self, time_s: float) -> None:
        """Lets time pass in steps, so that timers run in their order."""
        end_s = self.loop.now_s + time_s
        while self.loop.now_s < end_s:
            self.loop.now_s = min(end_s, self.loop.now_s + 1.0)
            self._settle()
            self.nothing_is_used_after_its_release()

    def _run(self, work: Coroutine[object, object, None]) -> None:
        self.loop.run_until_complete(work)
        self._settle()

    def _settle(self) -> None:
        self.loop.run_until_complete(turns())


def _plane(name: str) -> DataPlane:
    return DataPlane(replica=name, pipeline="p", generation="g", **LIMITS)


async def _send(sending: Coroutine[object, object, None], tickets: list[OfferedTicket]) -> None:
    try:
        await sending
    finally:
        for ticket in tickets:
            ticket.release()


async def _tolerant(work: Coroutine[object, object, None]) -> None:
    with suppress(StagemeshError):
        await work


TestTickets = TicketModel.TestCase
TestTickets.settings = model_settings(examples=25, steps=40)


class LongTicketModel(TicketModel):
    """The model at the length of a soak test."""


TestTicketsAtLength = pytest.mark.soak(pytest.mark.timeout(600)(LongTicketModel.TestCase))
TestTicketsAtLength.settings = model_settings(examples=200, steps=60)
