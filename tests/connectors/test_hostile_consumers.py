"""Answers of a broken or hostile consumer: they fail its own flow at most, and no other flow (D7)."""

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import grpc
import pytest

from stagemesh.common.errors import InternalError, NotReadyError, StagemeshError, UnavailableError
from stagemesh.common.plugins.connectors import AUTO, GRPC, SHM, ConnectorName
from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.common.wire.versions import OFFERS, own_protocol
from stagemesh.conformance import Host, assert_same, exchange, open_flow, packet, send_all, two_hosts, until
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import ConsumerAddress
from stagemesh.connectors.stream.connection import ProducerSession
from stagemesh.connectors.wire import key_to_wire
from stagemesh.stage_conformance.content import UNKNOWN_FIELD
from stagemesh.v1 import chunk_pb2, stage_pb2
from tests.connectors.handmade_producers import KEY, dialled, hello, opening
from tests.connectors.hosts import serving, started_host
from tests.connectors.minimum_profile import put_chunk_handler, stage_service
from tests.connectors.relays import relayed
from tests.rpc.call_errors import raises

HUGE = (1 << 64) - 1
CREDIT_BYTES = 64 << 20
UNKNOWN: Any = 99
"""The number of a connector that the API does not define."""

Reply = stage_pb2.PutReply
Answer: TypeAlias = Callable[[Any], list[Reply]]
"""The replies to an item of one kind."""


def opened(item: stage_pb2.OpenEdge, *, next_seq: int = 0, limit_bytes: int = CREDIT_BYTES) -> list[Reply]:
    opened = stage_pb2.EdgeOpened(
        key=item.key,
        next_seq=next_seq,
        credit_limit_bytes=limit_bytes,
        connector=item.connector,
        opening=item.opening,
        window_bytes=limit_bytes,
        credit_limit_chunks=1 << 32,
    )
    return [Reply(opened=opened)]


def _acked(item: chunk_pb2.Chunk) -> list[Reply]:
    ack = Reply(ack=stage_pb2.ChunkAck(key=item.key, next_seq=item.seq + 1))
    return [ack, *_committed(item)] if item.HasField("end") else [ack]


def _committed(item: Any) -> list[Reply]:
    return [Reply(commit=stage_pb2.EdgeCommit(key=item.key))]


def _resync(item: Any, **fields: Any) -> list[Reply]:
    return [Reply(resync=stage_pb2.EdgeResync(key=item.key, error=chunk_pb2.Error(code=14, message="again"), **fields))]


def _acked_so_far(item: Any) -> list[Reply]:
    return [Reply(ack=stage_pb2.ChunkAck(key=item.key, next_seq=0))]


def _rejected(item: Any, **fields: Any) -> list[Reply]:
    return [Reply(rejected=stage_pb2.EdgeRejected(key=item.key, error=chunk_pb2.Error(**fields)))]


def _unknown(reply: Reply) -> Reply:
    reply.MergeFromString(UNKNOWN_FIELD)
    return reply


def _granted(item: Any, limit_bytes: int) -> Reply:
    return Reply(credit=stage_pb2.CreditGrant(key=item.key, credit_limit_bytes=limit_bytes))


def _released(*lease_ids: int) -> Reply:
    return Reply(release=stage_pb2.LeaseRelease(lease_ids=lease_ids))


class Consumer:
    """Answers correctly, unless `answers` has another answer to an item of request "r"."""

    def __init__(self) -> None:
        self.welcome = stage_pb2.PutChunkResponse(
            welcome=stage_pb2.Welcome(
                replica="b-0", incarnation="i", inline_limit_bytes=4 << 10, protocol=own_protocol(OFFERS)
            )
        )
        self.answers: dict[str, Answer] = {}
        self.accepts_offers: list[bool] = []
        """Whether each offer is accepted, in order. All later offers are accepted."""
        self.connections = 0
        self.breaks: Iterator[grpc.StatusCode] = iter(())
        """The statuses, without ErrorInfo, with which the next streams end when the first item arrives."""
        self.last_words: list[Reply] = []
        """The replies before such a status."""

    async def put_chunk(
        self, requests: AsyncIterator[stage_pb2.PutChunkRequest], context: Any
    ) -> AsyncIterator[stage_pb2.PutChunkResponse]:
        self.connections += 1
        yield self.welcome
        async for request in requests:
            if request.items and (code := next(self.breaks, None)) is not None:
                yield stage_pb2.PutChunkResponse(replies=self.last_words)
                await context.abort(code, "the proxy has no time")
            for item in request.items:
                yield stage_pb2.PutChunkResponse(replies=self._replies(item))

    def _replies(self, item: stage_pb2.PutItem) -> list[Reply]:
        kind = item.WhichOneof("item") or ""
        content = getattr(item, kind)
        if kind == "offer":
            return [self._offer_reply(content)]
        if content.key.request_id == KEY.request_id and kind in self.answers:
            return self.answers[kind](content)
        usual: dict[str, Answer] = {"open": opened, "chunk": _acked}
        return usual[kind](content) if kind in usual else []

    def _offer_reply(self, offer: stage_pb2.Offer) -> Reply:
        answer = stage_pb2.OfferAnswer(connector=offer.connector)
        if not (self.accepts_offers.pop(0) if self.accepts_offers else True):
            answer.error.CopyFrom(chunk_pb2.Error(code=9, message="not now"))
        return Reply(offer_answer=answer)


class Scene:
    """A handwritten consumer, and a real producer."""

    def __init__(self, consumer: Consumer, plane: DataPlane, endpoint: str) -> None:
        self.consumer, self.plane, self.endpoint = consumer, plane, endpoint

    async def send(self, request: str = "r", *, connector: ConnectorName = GRPC, count: int = 3) -> Outlet:
        """Sends a flow to its end."""
        key, consumer = KEY._replace(request_id=request), ConsumerAddress("b-0", self.endpoint)
        outlet = self.plane.open_outlet(key, consumer, connector=connector, policy=StepPolicy())
        async with asyncio.timeout(10):
            await send_all(outlet, (packet(seq, 5000) for seq in range(count)))
        return outlet

    async def until_released(self) -> None:
        """Waits until the producer's arena is empty."""
        await until(lambda: not self.plane.arena.used_bytes, timeout_s=5)


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    consumer = Consumer()
    async with serving(stage_service(PutChunk=put_chunk_handler(consumer.put_chunk))) as endpoint:
        plane = DataPlane(replica="a-0", pipeline="p", generation="g", arena_bytes=1 << 20)
        try:
            yield Scene(consumer, plane, endpoint)
        finally:
            await plane.close()


FALSE_ANSWERS: list[tuple[str, str, Answer, str | None]] = [
    ("a reply of an unknown kind", "chunk", lambda item: [_unknown(Reply(key=item.key))], "unknown kind"),
    ("acks that say nothing new", "open", lambda item: opened(item) + _acked_so_far(item) + _resync(item), "again"),
    ("resync of every chunk", "chunk", _resync, "again and again"),
    ("failure of an unknown connector", "chunk", lambda item: _resync(item, failed=UNKNOWN), "99 is unknown"),
    ("rejection by an unknown code", "chunk", lambda item: _rejected(item, code=99, message="no"), "no"),
    ("rejection without a cause", "chunk", _rejected, None),
]


@pytest.mark.parametrize(("kind", "answer", "message"), [pytest.param(*case[1:], id=case[0]) for case in FALSE_ANSWERS])
async def test_false_answer_fails_its_flow_and_no_other(kind: str, answer: Answer, message: str | None) -> None:
    async with scene() as it:
        other = asyncio.create_task(it.send("other", count=200))
        it.consumer.answers[kind] = answer
        with pytest.raises(StagemeshError, match=message):
            await it.send()
        assert (await other).usage.chunks == 200
        assert it.consumer.connections == 1
        await it.until_released()


NOBODYS = key_to_wire(KEY._replace(request_id="?"))
IGNORABLE = Reply(ignorable=True).SerializeToString()
IDLE_TALK: list[tuple[str, list[Reply]]] = [
    ("nothing", [Reply()]),
    ("an ignorable kind of later versions", [Reply.FromString(bytes([0xBA, 0x06, 1, 0]) + IGNORABLE)]),
    ("opened, of an unknown flow", [Reply(opened=stage_pb2.EdgeOpened(key=NOBODYS, next_seq=HUGE))]),
    ("ack, of an unknown flow", [Reply(ack=stage_pb2.ChunkAck(key=NOBODYS, next_seq=HUGE))]),
    ("credit, of an unknown flow", [Reply(credit=stage_pb2.CreditGrant(key=NOBODYS, credit_limit_bytes=HUGE))]),
    ("commit, of an unknown flow", [Reply(commit=stage_pb2.EdgeCommit(key=NOBODYS))]),
    ("rejected, of an unknown flow", [Reply(rejected=stage_pb2.EdgeRejected(key=NOBODYS))]),
    ("resync, of an unknown flow", [Reply(resync=stage_pb2.EdgeResync(key=NOBODYS))]),
    ("resync, of an unknown flow and connector", [Reply(resync=stage_pb2.EdgeResync(key=NOBODYS, failed=UNKNOWN))]),
    ("leases that there are not", [_released(0, 1, 99, HUGE), _released(1, 1)]),
    ("answer to no offer", [Reply(offer_answer=stage_pb2.OfferAnswer(connector=chunk_pb2.CONNECTOR_SHM))]),
    ("answer for an unknown connector", [Reply(offer_answer=stage_pb2.OfferAnswer(connector=UNKNOWN))]),
]


@pytest.mark.parametrize("talk", [pytest.param(replies, id=name) for name, replies in IDLE_TALK])
async def test_meaningless_replies_are_ignored(talk: list[Reply]) -> None:
    async with scene() as it:
        it.consumer.answers["open"] = lambda item: talk + opened(item)
        it.consumer.answers["chunk"] = lambda item: talk + _acked(item) + talk
        assert (await it.send()).usage.chunks == 3
        assert it.consumer.connections == 1
        await it.until_released()


async def test_consumer_with_too_many_replies_is_disconnected_at_once() -> None:
    session = ProducerSession("b-0", lambda _: stage_pb2.PutItem())
    unread = stage_pb2.PutChunkResponse(replies=[Reply(accept=stage_pb2.AcceptTickets())] * 5000)
    began_s = time.thread_time()
    with pytest.raises(InternalError, match=r"b-0 sent an answer that cannot be read: .* more than 131,072 values"):
        session.received(b"\x12\0" * (4 << 20))
    with pytest.raises(InternalError, match="read 4096"):
        session.received(unread.SerializeToString())
    assert time.thread_time() - began_s < 2


REJECTED = stage_pb2.PutChunkResponse(replies=_rejected(opening().open, code=3, message="BAD")).SerializeToString()
UNREADABLE = {
    "INTERNAL": (REJECTED.replace(b"BAD", b"\xff\xfe\xfd"), "replica b-0 sent an answer .* is not UTF-8"),
    "MESSAGE_TOO_LARGE": (bytes(9 << 20), "b-0 at .* is too large .*9437184 vs. 8388608"),
}


@pytest.mark.parametrize("reason", UNREADABLE)
async def test_an_answer_that_cannot_be_received_fails_its_flows_with_the_cause(reason: str) -> None:
    answer, problem = UNREADABLE[reason]

    async def put_chunk(requests: AsyncIterator[bytes], _context: object) -> AsyncIterator[bytes]:
        yield Consumer().welcome.SerializeToString()
        async for data in requests:
            if stage_pb2.PutChunkRequest.FromString(data).items:
                yield answer

    make: Any = grpc.stream_stream_rpc_method_handler
    options = [("grpc.max_send_message_length", -1)]
    async with serving(stage_service(PutChunk=make(put_chunk)), options=options) as endpoint:
        plane = DataPlane(replica="a-0", pipeline="p", generation="g", arena_bytes=1 << 20)
        with raises(StagemeshError, reason=reason, match=problem):
            await Scene(Consumer(), plane, endpoint).send()
        await plane.close()


@pytest.mark.parametrize("limit_bytes", [HUGE, 1 << 40])
async def test_unlimited_credit_is_bounded_by_the_arena(limit_bytes: int) -> None:
    async with scene() as it:
        it.consumer.answers["open"] = lambda item: opened(item, limit_bytes=limit_bytes)
        it.consumer.answers["chunk"] = lambda item: [*_acked(item), _granted(item, HUGE)]
        assert (await it.send(count=200)).usage.chunks == 200
        assert it.plane.arena.used_bytes <= it.plane.arena.size_bytes


async def test_leases_returned_twice_or_too_early_free_nothing_else() -> None:
    async with scene() as it:
        it.consumer.answers["chunk"] = lambda item: [_released(*range(item.data.lease_id + 9))] * 2 + _acked(item)
        assert (await it.send(connector=SHM, count=50)).attempt.connector == SHM
        await it.until_released()


async def test_connector_that_worked_is_offered_again_after_a_rejection() -> None:
    async with scene() as it:
        it.consumer.accepts_offers = [True, False]
        failures = iter([True])
        it.consumer.answers["chunk"] = lambda item: (
            _resync(item, failed=chunk_pb2.CONNECTOR_SHM) if next(failures, False) else _acked(item)
        )
        assert (await it.send(connector=SHM)).attempt.connector == SHM


@pytest.mark.parametrize("last_words", [[], [_released()]], ids=["silent", "releases nothing"])
async def test_a_consumer_whose_streams_always_break_counts_as_unreachable(
    last_words: list[Reply], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stagemesh.connectors.peer_timeouts.LOST_CONSUMER_S", 0.5)
    async with scene() as it:
        it.consumer.breaks = itertools.repeat(grpc.StatusCode.INVALID_ARGUMENT)
        it.consumer.last_words = last_words
        with raises(UnavailableError, reason="CONNECTION_LOST", match="the proxy has no time"):
            await it.send()


async def test_welcome_without_incarnation_is_rejected() -> None:
    async with scene() as it:
        it.consumer.welcome.welcome.incarnation = ""
        with pytest.raises(StagemeshError, match="incarnation"):
            await it.send()


async def test_consumer_that_does_not_begin_with_welcome_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stagemesh.connectors.stream.connection._HANDSHAKE_S", 0.2)
    monkeypatch.setattr("stagemesh.connectors.peer_timeouts.LOST_CONSUMER_S", 0.5)
    async with scene() as it:
        it.consumer.welcome = stage_pb2.PutChunkResponse(replies=[_released(1)])
        with pytest.raises(StagemeshError, match="did not answer"):
            await it.send(connector=AUTO)


NOBODYS_SOCKET = "stagemesh-nobody-listens-here"


@asynccontextmanager
async def _claimed(connector: str, *, somebodys: bool) -> AsyncIterator[tuple[Host, Host, Outlet, Inlet]]:
    """Yields a flow to a consumer that names another replica's local socket, or one that does not exist."""
    async with two_hosts() as (a, b), relayed(b.endpoint) as relay, started_host("c-0") as other:
        relay.false_socket = NOBODYS_SOCKET
        if somebodys:
            async with dialled(other, hello(replica="curious")) as curious:
                relay.false_socket = (await curious.welcome()).local_socket
        yield a, other, *open_flow(a, b, connector=connector, endpoint=relay.endpoint)


@pytest.mark.parametrize("somebodys", [True, False])
async def test_auto_serves_a_false_claimant_over_the_network(somebodys: bool) -> None:
    sent = [packet(seq, 100_000) for seq in range(5)]
    async with _claimed("auto", somebodys=somebodys) as (a, other, outlet, inlet):
        assert_same(await exchange(outlet, inlet, sent), sent)
        assert outlet.attempt.connector != SHM
        # The replica that owns the socket still works.
        assert_same(await exchange(*open_flow(a, other, request="r2", connector=SHM), sent), sent)


@pytest.mark.parametrize("somebodys", [True, False])
async def test_shm_is_rejected_for_a_false_claimant(somebodys: bool) -> None:
    async with _claimed(SHM, somebodys=somebodys) as (_, _, outlet, _):
        with pytest.raises(NotReadyError, match="not on one host"):
            await outlet.send(packet(0, 100_000))
