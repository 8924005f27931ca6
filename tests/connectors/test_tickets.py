"""Hand-over tickets over real gRPC: one release for each state, and no use after it."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest

from stagemesh.common import errors
from stagemesh.common.plugins.connectors import GRPC, SHM, ConnectorName
from stagemesh.common.wire.chunk_sizes import FramesPolicy, StepPolicy, WholePolicy
from stagemesh.conformance import Host, Proxy, proxied, two_hosts, until
from stagemesh.connectors import peer_timeouts
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet, ReceivedTicket, Ticket
from stagemesh.connectors.stream import local_socket
from stagemesh.v1 import chunk_pb2, stage_pb2, tensor_pb2
from tests.connectors.handmade_producers import KEY, Peer, chunk, opening, peer
from tests.connectors.hosts import started_host
from tests.connectors.offers import KIND, LIMIT_S, Offers, open_ticket_flow, take
from tests.rpc.call_errors import raises

BOUND_S = 5.0
NEXT = EdgeKey("r", "a->b", 2)
"""The second attempt of a flow."""
eventually = partial(until, timeout_s=BOUND_S)


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets replicas believe that they are on different hosts, so that no process is watched."""

    async def refuse(name: str, *, arena_fd: int | None) -> socket.socket:
        raise ConnectionRefusedError(f"{name} is on another host ({arena_fd})")

    monkeypatch.setattr(local_socket, "dial", refuse)


@dataclass
class Flow:
    """A flow from "a-0" to "b-0" that carries a packet with tickets."""

    a: Host
    b: Host
    offers: Offers
    outlet: Outlet
    inlet: Inlet

    async def finish(self) -> None:
        """Ends the flow and reads its rest."""
        await finish(self.outlet, self.inlet)


@asynccontextmanager
async def ticket_flow(
    *names: str, time_limit_s: float = LIMIT_S, limits: Mapping[str, int] | None = None, **flow: Any
) -> AsyncGenerator[Flow]:
    """Sends a packet with a ticket for each name. `limits` are limits of the data planes, `flow` is for `open_flow`."""
    offers = Offers()
    async with two_hosts(**(limits or {})) as (a, b):
        outlet, inlet = open_ticket_flow(a, b, **flow)
        await offers.send(outlet, *names, time_limit_s=time_limit_s)
        yield Flow(a, b, offers, outlet, inlet)


@dataclass
class HandedOver(Flow):
    """A flow whose ticket the engine of "b-0" has received from the engine of "a-0"."""

    ticket: Ticket


@asynccontextmanager
async def handed_over(**arguments: Any) -> AsyncGenerator[HandedOver]:
    async with ticket_flow(**arguments) as flow:
        yield HandedOver(**vars(flow), ticket=await take(flow.inlet))


@asynccontextmanager
async def handed_over_through_proxy() -> AsyncGenerator[tuple[HandedOver, Proxy]]:
    offers = Offers()
    async with two_hosts() as (a, b), proxied(b.endpoint) as (proxy, endpoint):
        outlet, inlet = open_ticket_flow(a, b, connector=GRPC, endpoint=endpoint)
        await offers.send(outlet)
        yield HandedOver(a, b, offers, outlet, inlet, await take(inlet)), proxy


@asynccontextmanager
async def ticket_peer() -> AsyncGenerator[tuple[Peer, Inlet]]:
    """Yields a producer that has opened a flow whose reader accepts tickets, and the reader's inlet."""
    async with peer() as one:
        inlet = one.host.plane.open_inlet(KEY, producer="a-0", ticket_kinds=[KIND])
        await one.put(opening())
        await one.answer("opened")
        yield one, inlet
        await inlet.aclose()


async def finish(outlet: Outlet, inlet: Inlet) -> None:
    """Ends a flow and reads its rest."""
    finishing = asyncio.create_task(outlet.finish())
    assert [packet async for packet in inlet] == []
    await finishing
    await inlet.aclose()


@pytest.mark.parametrize("connector", [GRPC, SHM])
async def test_ticket_arrives_with_the_tensors_of_its_packet(connector: ConnectorName) -> None:
    async with ticket_flow(limits={"inline_limit_bytes": 0}, connector=connector) as it:
        packet = await anext(aiter(it.inlet))
        ticket = packet.tickets["kv"]
        assert packet.tensors["first_token"].tolist() == [7]
        assert (ticket.kind, ticket.descriptor, ticket.size_bytes) == (KIND, b"kv", 1 << 30)
        assert packet.size_bytes == 4


async def test_state_is_released_once_when_its_reader_releases_the_ticket() -> None:
    async with handed_over() as it:
        assert await it.ticket.accept() > asyncio.get_running_loop().time()
        assert it.offers.released == []
        it.ticket.release()
        it.ticket.release()
        await eventually(lambda: it.offers.released == ["kv"])
        await it.finish()
    assert it.offers.released == ["kv"]


async def test_dropped_ticket_ends_like_a_released_one(no_collector: None) -> None:
    async with ticket_flow() as it:
        ticket = await take(it.inlet)
        await ticket.accept()
        await asyncio.sleep(0.05)
        assert it.offers.released == []
        del ticket
        await eventually(lambda: it.offers.released == ["kv"])
        await it.finish()
    assert it.offers.released == ["kv"]


async def test_ticket_without_an_acceptance_is_kept_until_the_flow_ends() -> None:
    async with ticket_flow() as it:
        (await take(it.inlet)).release()
        await asyncio.sleep(0.05)
        assert it.offers.released == []
        await it.finish()
        await eventually(lambda: it.offers.released == ["kv"])


async def test_ticket_cannot_be_accepted_after_its_time_limit() -> None:
    async with handed_over(time_limit_s=0.05) as it:
        await eventually(lambda: it.offers.released == ["kv"])
        with raises(errors.UnavailableError, reason="TICKET_EXPIRED"):
            await it.ticket.accept()
        it.ticket.release()
    assert it.offers.released == ["kv"]


async def test_acceptance_renews_the_time_limit() -> None:
    async with handed_over(time_limit_s=0.4) as it:
        for _ in range(3):
            until_s = await it.ticket.accept()
            await asyncio.sleep(0.3)
            assert it.offers.released == []
            assert asyncio.get_running_loop().time() < until_s
        await eventually(lambda: it.offers.released == ["kv"])


async def test_companions_are_released_together() -> None:
    async with ticket_flow("with prompt", "without prompt") as it:
        first, second = (await anext(aiter(it.inlet))).tickets.values()
        await first.accept()
        first.release()
        await second.accept()
        assert it.offers.released == []
        second.release()
        await eventually(lambda: it.offers.released == ["with prompt", "without prompt"])


async def test_state_for_two_consumers_is_released_after_the_last() -> None:
    offers = Offers()
    async with started_host("c-0") as c, two_hosts() as (a, b):
        flows = [open_ticket_flow(a, consumer) for consumer in (b, c)]
        fan_out = a.plane.fan_out()
        for outlet, _ in flows:
            fan_out.add(outlet)
        ticket = offers.offer()
        await fan_out.send(Packet({}, tickets={"kv": ticket}))
        ticket.release()
        first, second = [await take(inlet) for _, inlet in flows]
        for each in (first, second):
            await each.accept()
        first.release()
        await asyncio.sleep(0.05)
        assert offers.released == []
        second.release()
        await eventually(lambda: offers.released == ["kv"])


# -- broken connections and ends that die


async def test_ticket_survives_a_broken_connection() -> None:
    async with handed_over_through_proxy() as (it, proxy):
        proxy.cut()
        await it.ticket.accept()
        proxy.cut()
        await it.ticket.accept()
        assert it.offers.released == []
        proxy.cut()
        it.ticket.release()
        await eventually(lambda: it.offers.released == ["kv"])
        await it.finish()


async def test_acceptance_that_is_cut_off_is_repeated() -> None:
    async with handed_over_through_proxy() as (it, proxy):
        for turns in range(8):
            accepting = asyncio.create_task(it.ticket.accept())
            for _ in range(turns):
                await asyncio.sleep(0)
            proxy.cut()
            await accepting
        assert it.offers.released == []


async def test_lost_consumer_leaves_the_ticket_to_its_successor(apart: None) -> None:
    async with started_host("c-0") as c, handed_over(rebind_s=10) as it:
        await it.ticket.accept()
        await it.b.close()
        await eventually(lambda: it.outlet.is_lost)
        assert it.offers.released == []
        successor = c.plane.open_inlet(NEXT, producer="a-0", ticket_kinds=[KIND])
        it.outlet.check_rebindable()
        it.a.plane.rebind_outlet(it.outlet, NEXT, consumer=ConsumerAddress(c.replica, c.endpoint), connector=GRPC)
        again = await take(successor)
        await again.accept()
        it.ticket.release()
        again.release()
        await eventually(lambda: it.offers.released == ["kv"])


async def test_lost_consumer_without_a_successor_releases_the_state(apart: None) -> None:
    async with handed_over() as it:
        await it.b.close()
        await eventually(lambda: it.offers.released == ["kv"])
        with raises(errors.UnavailableError, reason="TICKET_LOST"):
            await it.ticket.accept()


async def test_ticket_of_a_former_incarnation_is_refused() -> None:
    async with handed_over() as it:
        await it.a.close()
        async with started_host("a-0") as restarted:
            other, other_inlet = open_ticket_flow(restarted, it.b, request="r2")
            await Offers().send(other)
            await (await take(other_inlet)).accept()
            with raises(errors.UnavailableError, reason="TICKET_LOST"):
                await it.ticket.accept()
    assert it.offers.released == ["kv"]


async def test_producer_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch, apart: None) -> None:
    monkeypatch.setattr(peer_timeouts, "TICKET_ANSWER_S", 0.1)
    async with handed_over_through_proxy() as (it, proxy):
        proxy.targets[:] = ["127.0.0.1:9"]
        proxy.cut()
        with raises(errors.UnavailableError, reason="TICKET_LOST"):
            await it.ticket.accept()


# -- flows that end early


async def test_aborted_flow_keeps_a_state_that_is_being_read() -> None:
    async with handed_over() as it:
        await it.ticket.accept()
        it.outlet.abort(errors.InternalError("the engine failed"))
        with pytest.raises(errors.InternalError):
            await take(it.inlet)
        await it.inlet.aclose()
        await asyncio.sleep(0.05)
        assert it.offers.released == []
        it.ticket.release()
        await eventually(lambda: it.offers.released == ["kv"])


async def test_aborted_flow_releases_a_state_without_a_reader() -> None:
    async with ticket_flow() as it:
        it.outlet.abort(errors.InternalError("the engine failed"))
        await it.inlet.aclose()
        await eventually(lambda: it.offers.released == ["kv"])


async def test_used_ticket_is_not_sent_to_another_consumer() -> None:
    async with handed_over(rebind_s=10) as it:
        await it.ticket.accept()
        it.outlet.check_rebindable()
        it.ticket.release()
        await eventually(lambda: it.offers.released == ["kv"])
        with raises(errors.NotReadyError, reason="CHUNK_GONE"):
            it.outlet.check_rebindable()


async def test_ticket_that_a_new_producer_repeats_is_dropped() -> None:
    repeated = Offers()
    async with started_host("c-0") as c, handed_over(rebind_s=10) as it:
        await it.ticket.accept()
        it.b.plane.rebind_inlet(it.inlet, NEXT, producer=c.replica, first_rows={})
        consumer = ConsumerAddress(it.b.replica, it.b.endpoint)
        again = c.plane.open_outlet(NEXT, consumer, connector=GRPC, policy=StepPolicy())
        await repeated.send(again)
        await finish(again, it.inlet)
        await eventually(lambda: repeated.released == ["kv"])
        assert it.offers.released == []


# -- tickets that cannot be sent


async def test_flow_with_a_kind_that_the_reader_does_not_accept_is_rejected() -> None:
    async with ticket_flow(ticket_kinds=("other.state",)) as it:
        with raises(errors.UnsupportedError, reason="TICKET_REFUSED", match=r"accepts other\.state"):
            await it.outlet.finish()
        await eventually(lambda: it.offers.released == ["kv"])
        with pytest.raises(errors.UnsupportedError):
            await take(it.inlet)


@pytest.mark.parametrize("policy", [WholePolicy(), FramesPolicy(1)])
async def test_policy_that_cuts_packets_rejects_tickets(policy: WholePolicy | FramesPolicy) -> None:
    offers = Offers()
    async with two_hosts() as (a, b):
        outlet, _ = open_ticket_flow(a, b, policy=policy)
        with pytest.raises(errors.InvalidChunkError, match="cannot be cut"):
            await offers.send(outlet)
    assert offers.released == ["kv"]


@pytest.mark.parametrize(
    ("tensor_bytes", "names", "message"),
    [(64 << 10, 1, ""), ((64 << 10) + 1, 1, "a packet of their own"), (0, 17, "at most 16"), (4, 0, "")],
)
async def test_limits_of_a_packet_with_tickets(tensor_bytes: int, names: int, message: str) -> None:
    offered = {f"kv{number}": Offers().offer(f"kv{number}") for number in range(names)}
    async with two_hosts() as (a, b):
        outlet, inlet = open_ticket_flow(a, b)
        packet = Packet({"x": np.zeros(tensor_bytes, np.uint8)}, tickets=offered)
        if message:
            with pytest.raises(errors.InvalidChunkError, match=message):
                await outlet.send(packet)
        else:
            await outlet.send(packet)
            assert len((await anext(aiter(inlet))).tickets) == names


async def test_ticket_needs_no_credit() -> None:
    offers = Offers()
    async with two_hosts(window_bytes=4) as (a, b):
        outlet, inlet = open_ticket_flow(a, b)
        await offers.send(outlet)
        ticket = offers.offer("second")
        await outlet.send(Packet({}, tickets={"kv": ticket}))
        ticket.release()
        assert [(await take(inlet)).descriptor for _ in range(2)] == [b"kv", b"second"]


async def test_offered_ticket_can_be_used_without_a_data_plane() -> None:
    offers = Offers()
    ticket = offers.offer()
    assert await ticket.accept() > asyncio.get_running_loop().time()
    ticket.release()
    assert offers.released == ["kv"]
    with raises(errors.StagemeshError, reason="TICKET_EXPIRED"):
        await ticket.accept()


# -- messages of hostile peers


def _handover(name: str = "kv", shape: Sequence[int] = (), **fields: Any) -> tensor_pb2.Tensor:
    handover = {"kind": KIND, "state_descriptor": b"x", "size_bytes": 1, "time_limit_s": 30.0, **fields}
    return tensor_pb2.Tensor(name=name, shape=shape, handover=tensor_pb2.Handover(**handover))


_TEXT = tensor_pb2.Tensor(name="x", dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[1], inline=b"1")


def _data(*tensors: tensor_pb2.Tensor, size_bytes: int = 0, lease_id: int = 5) -> chunk_pb2.ChunkData:
    return chunk_pb2.ChunkData(tensors=tensors, size_bytes=size_bytes, lease_id=lease_id)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(_data(_handover(), lease_id=0), id="no lease"),
        pytest.param(_data(_handover(), _TEXT, _handover("kv2"), size_bytes=1), id="tensor after a ticket"),
        pytest.param(_data(_handover(), size_bytes=1), id="size of the state counted"),
        pytest.param(_data(_handover(), _handover()), id="same name twice"),
        pytest.param(_data(_TEXT, _handover("x"), size_bytes=1), id="name of a tensor"),
        pytest.param(_data(*(_handover(f"kv{n}") for n in range(17))), id="too many tickets"),
        pytest.param(_data(_handover(state_descriptor=b"x" * ((64 << 10) + 1))), id="long descriptor"),
        pytest.param(_data(_handover(time_limit_s=0.0)), id="no time"),
        pytest.param(_data(_handover(time_limit_s=float("nan"))), id="time that is no number"),
        pytest.param(_data(_handover(time_limit_s=float("inf"))), id="endless time"),
        pytest.param(_data(_handover(shape=[3])), id="ticket with a shape"),
    ],
)
async def test_malformed_ticket_is_rejected(data: chunk_pb2.ChunkData) -> None:
    async with ticket_peer() as (one, inlet):
        await one.put(chunk(data=data))
        assert await one.reason() == "INVALID_CHUNK"
        await inlet.aclose()
        # No lease is retained for it.
        for producer in one.host.plane.consumer._producers.values():
            assert not producer.held_lease_ids


@pytest.mark.parametrize("kind", ["", "KV", "other.kv", "a" * 65, "x\0"])
async def test_ticket_of_another_kind_is_refused_and_its_lease_returned(kind: str) -> None:
    async with ticket_peer() as (one, inlet):
        await one.put(chunk(data=_data(_handover(kind=kind))))
        assert (await one.answer("release")).release.lease_ids == [5]
        with pytest.raises(errors.UnsupportedError):
            await take(inlet)


async def test_repeated_and_unknown_answers_are_ignored() -> None:
    async with ticket_peer() as (one, inlet):
        await one.put(chunk(data=_data(_handover())))
        ticket = await take(inlet)
        accepting = asyncio.create_task(ticket.accept())
        accept = (await one.answer("accept")).accept
        assert accept.lease_id == 5
        unknown = stage_pb2.TicketsAnswer(acceptance=accept.acceptance + 1)
        answer = stage_pb2.TicketsAnswer(acceptance=accept.acceptance)
        refusal = stage_pb2.TicketsAnswer(acceptance=accept.acceptance, error=chunk_pb2.Error(code=14))
        for each in (unknown, answer, answer, refusal):
            await one.put(stage_pb2.PutItem(tickets=each))
        assert await accepting > 0


async def test_lease_of_another_consumer_cannot_be_accepted() -> None:
    async with started_host("c-0") as c, handed_over() as it:
        producer = "a-0", it.a.plane.incarnation
        [lease_id] = it.b.plane.consumer._producers[producer].held_lease_ids
        _, other = open_ticket_flow(it.a, c, request="r2")
        await eventually(lambda: producer in c.plane.consumer._producers)
        accept = partial(c.plane.consumer._producers[producer].acceptances.accept, lease_id)
        offer = tensor_pb2.Handover(kind=KIND, size_bytes=1, time_limit_s=30)
        thief = ReceivedTicket(offer, accept=accept, on_release=lambda: None)
        with raises(errors.UnavailableError, reason="TICKET_EXPIRED"):
            await thief.accept()
        await it.ticket.accept()
        await other.aclose()
