"""The fake engine hands state over: a `prefill` stage offers it, and a `decode` stage reads it."""

import asyncio
import gc
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

import pytest
from pydantic import JsonValue

from stagemesh.common.errors import InvalidRequestError, StagemeshError, UnavailableError
from stagemesh.conformance.replicas import until
from stagemesh.connectors.packets import OfferedTicket, Packet
from stagemesh.fake_engine import KIND, STATE
from stagemesh.fake_engine.engine import FakeEngine
from stagemesh.fake_engine.outputs import decoded_text, state_content
from stagemesh.fake_engine.state_store import StateCounts, StateStore, read_state
from stagemesh.services.engines.base import SamplingOptions, Task
from tests.engines.support import collect, flow, packets, stage_config, started, text_of
from tests.rpc.call_errors import raises

TASK = Task("r", seed=3, prompt="hello", sampling=SamplingOptions(max_tokens=5))


def running(function: str, **options: JsonValue) -> AbstractAsyncContextManager[FakeEngine]:
    return started(FakeEngine(stage_config("fake", function=function, options=options)))


async def offered(engine: FakeEngine) -> OfferedTicket:
    [packet] = packets(await collect(engine.submit(TASK)))
    ticket = packet.tickets[STATE]
    assert isinstance(ticket, OfferedTicket)
    return ticket


def decoding(*tickets: OfferedTicket) -> Task:
    return replace(TASK, inlets={"prefill->decode": flow(Packet({}, tickets={STATE: ticket}) for ticket in tickets)})


def expected() -> str:
    state = state_content(TASK, 1000)
    return b"".join(decoded_text(state, step).tobytes() for step in range(5)).decode()


async def test_decode_computes_its_text_from_the_state() -> None:
    async with running("prefill", state_bytes=100_000) as prefill, running("decode") as decode:
        ticket = await offered(prefill)
        assert (ticket.kind, ticket.size_bytes) == (KIND, 100_000)
        assert text_of(await collect(decode.submit(decoding(ticket)))) == expected()
        assert prefill.states.counts == StateCounts(offered=1, released=1)


async def test_state_that_is_released_while_it_is_read_is_counted() -> None:
    store = StateStore()
    await store.start()
    ticket = store.offer(b"x" * 1000, time_limit_s=30)
    reading = asyncio.create_task(read_state(ticket.descriptor, pause_s=0.2))
    await until(lambda: store.counts.reads == 1, timeout_s=10)
    ticket.release()
    with pytest.raises(UnavailableError):
        await reading
    with pytest.raises(UnavailableError, match="has been released"):
        await read_state(ticket.descriptor)
    assert store.counts == StateCounts(offered=1, released=1, cut_reads=1, refused_reads=1)
    await store.close()


@pytest.mark.parametrize(
    "descriptor", [b"", b"{}", b"\xff\xfe", b"[1]", b'{"socket": 1, "state": 2}', b"null", b"9" * 9999]
)
async def test_descriptor_that_cannot_be_read_is_an_error_of_the_request(descriptor: bytes) -> None:
    bogus = OfferedTicket(KIND, descriptor, size_bytes=1, time_limit_s=30, on_release=lambda: None)
    async with running("decode", recompute=True) as decode:
        with raises(InvalidRequestError, reason="INVALID_TICKET"):
            await collect(decode.submit(decoding(bogus)))


@pytest.mark.parametrize("recompute", [False, True])
async def test_lost_state_is_recomputed_or_an_error_that_restarts_the_steps(recompute: bool) -> None:
    async with running("prefill") as prefill, running("decode", recompute=recompute) as decode:
        ticket = await offered(prefill)
        await prefill.close()
        try:
            assert text_of(await collect(decode.submit(decoding(ticket)))) == expected()
            assert recompute
        except StagemeshError as exc:
            assert (exc.reason, recompute) == ("TICKET_LOST", False)  # noqa: PT017 - the other case has no error


async def test_edge_without_a_ticket_is_an_error() -> None:
    async with running("decode") as decode:
        with pytest.raises(StagemeshError, match="received no ticket"):
            await collect(decode.submit(decoding()))


async def test_stopped_task_releases_its_ticket() -> None:
    async with running("prefill") as prefill, running("decode", state_s=30.0) as decode:
        ticket = await offered(prefill)
        stopped = asyncio.create_task(collect(decode.submit(decoding(ticket))))
        await until(lambda: prefill.states.counts.reads == 1, timeout_s=10)
        stopped.cancel()
        await asyncio.gather(stopped, return_exceptions=True)
        gc.collect()
        assert prefill.states.counts.released == 1


async def test_waiting_task_prefetches_if_the_queue_is_short() -> None:
    async with running("prefill") as prefill, running("decode", max_running=1, prefetch=1, step_s=0.2) as decode:
        tasks = [asyncio.create_task(collect(decode.submit(decoding(await offered(prefill))))) for _ in range(3)]
        await until(lambda: prefill.states.counts.released == 2, timeout_s=10)
        # The first task runs, the second one waits, and the queue is too long for the third one.
        assert prefill.states.counts.reads == 2
        for task in tasks:
            assert text_of(await task) == expected()
        assert prefill.states.counts == StateCounts(offered=3, released=3)
