"""A prefill engine that hands KV caches over to a decode engine, without the data plane between them."""

import asyncio
import base64
import random
import zlib
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import pytest_asyncio
from pydantic import JsonValue

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.connectors.packets import OfferedTicket, Packet, ReceivedTicket, Ticket
from stagemesh.services.engines.base import Checkpoint, SamplingOptions, Task, Usage
from stagemesh.services.engines.prompts import RawPrompt
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.engines.vllm.options import KV_CACHE
from stagemesh.v1 import tensor_pb2
from tests.engines.support import OpenEdge, collect, controls_of, packets, tokens_of
from tests.engines.vllm.engines import started
from tests.engines.vllm.tiny_adapter import write_adapter
from tests.engines.vllm.tiny_model import write_real_model
from tests.rpc.call_errors import raises

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

POSITIONS = 1024
OPTIONS: Mapping[str, JsonValue] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 16 << 20,
    "checkpoint_tokens": 8,
    "enable_lora": True,
    "max_lora_rank": 8,
}
GREEDY = SamplingOptions(max_tokens=12, temperature=0.0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=1.0, logprobs=2)
_ROLES = ("prefill", "decode")
BLOCK = 128
"""The number of tokens in a block of the KV cache on a CPU."""


class Pair(NamedTuple):
    prefill: VllmEngine
    decode: VllmEngine

    async def check_no_blocks(self) -> None:
        """Waits until no block of either engine is in use."""
        for engine in self:
            await check_no_blocks(engine)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    model = write_real_model(tmp_path_factory.mktemp("real"), positions=POSITIONS, deviation=0.2)
    async with started_pair(model, OPTIONS, min_tokens=4, wait_s=2.0) as pair:
        yield pair


@asynccontextmanager
async def started_pair(model: Path, options: Mapping[str, JsonValue], **handover: JsonValue) -> AsyncIterator[Pair]:
    """Starts a prefill and a decode engine. `handover` contains the options of both sides."""
    prefill, decode = (started(model, **options, kv_handover={"role": role, **handover}) for role in _ROLES)
    async with prefill as one, decode as other:
        yield Pair(one, other)


async def check_no_blocks(engine: VllmEngine) -> None:
    caches = controls_of(engine).caches
    async with asyncio.timeout(10):
        while True:
            try:
                # Fails while a block is in use.
                await caches.clear_caches(preempt=False)
            except NotReadyError:
                await asyncio.sleep(0.02)
            else:
                return


def task(name: str, length: int, *, seed: int = 1, sampling: SamplingOptions = GREEDY) -> Task:
    prompt = tuple(4 + (7 * seed + i * i) % 250 for i in range(length))
    return Task(name, seed, RawPrompt(prompt), sampling=sampling, wanted=frozenset({"token_ids"}))


async def prefilled(engine: VllmEngine, task: Task) -> list[Packet]:
    prefilling = replace(task, sampling=SamplingOptions(), wanted=frozenset({KV_CACHE}))
    return packets(await collect(engine.submit(prefilling)))


async def damaged(engine: VllmEngine, task: Task, parameters: Mapping[str, object]) -> list[Packet]:
    """Returns the packets of a prefill stage that writes other parameters into its ticket."""
    ticket = ticket_of(sent := await prefilled(engine, task))
    descriptor = msgspec.msgpack.decode(ticket.descriptor)
    descriptor["parameters"] |= parameters
    ticket.descriptor = msgspec.msgpack.encode(descriptor)
    return sent


async def stream(sent: Sequence[Packet]) -> AsyncIterator[Packet]:
    """Yields the packets as a consumer receives them: their tickets are released when they are deleted, too."""
    for packet in sent:
        yield Packet({}, tickets={name: received(ticket) for name, ticket in packet.tickets.items()})


def received(ticket: Ticket) -> ReceivedTicket:
    async def accept() -> None:
        await ticket.accept()

    offer = tensor_pb2.Handover(
        kind=ticket.kind,
        state_descriptor=ticket.descriptor,
        size_bytes=ticket.size_bytes,
        time_limit_s=ticket.time_limit_s,
    )
    return ReceivedTicket(offer, accept=accept, on_release=ticket.release)


async def decoded(engine: VllmEngine, task: Task, sent: Sequence[Packet]) -> list[int]:
    events = await collect(engine.submit(replace(task, inlets={"in": stream(sent)})))
    assert isinstance(events[-1], Usage)
    return tokens_of(events)


def ticket_of(sent: Sequence[Packet]) -> OfferedTicket:
    (packet,) = sent
    ticket = packet.tickets[KV_CACHE]
    assert isinstance(ticket, OfferedTicket)
    return ticket


async def alone(pair: Pair, task: Task) -> list[int]:
    """Returns the tokens that the decode engine samples if it computes the prompt itself."""
    tokens = await decoded(pair.decode, task, [])
    await check_no_blocks(pair.decode)
    return tokens


async def handed_over(pair: Pair, task: Task) -> list[int]:
    sent = await prefilled(pair.prefill, task)
    tokens = await decoded(pair.decode, task, sent)
    assert ticket_of(sent).is_released
    return tokens


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED])
@pytest.mark.parametrize("length", [4, BLOCK - 1, BLOCK, BLOCK + 1, 700])
async def test_tokens_equal_those_of_one_engine(pair: Pair, length: int, sampling: SamplingOptions) -> None:
    each = task(f"equal-{length}", length, seed=length, sampling=sampling)
    assert await handed_over(pair, each) == await alone(pair, each)
    await pair.check_no_blocks()


async def test_concurrent_requests_keep_their_tokens(pair: Pair) -> None:
    tasks = [task(f"many-{i}", 20 + 37 * i, seed=i, sampling=SEEDED if i % 2 else GREEDY) for i in range(16)]
    expected = [await alone(pair, each) for each in tasks]
    assert await asyncio.gather(*(handed_over(pair, each) for each in tasks)) == expected
    await pair.check_no_blocks()


async def test_prompt_is_computed_again_if_no_ticket_arrives(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    silent = OpenEdge()
    events = await collect(pair.decode.submit(replace(task("no-ticket", 150), inlets={"in": silent})))
    assert sum(len(packet.tensors["token_ids"]) for packet in packets(events)) == GREEDY.max_tokens
    assert "did not arrive within 2 s" in caplog.text


async def test_expired_ticket_is_not_read(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    each = task("expired", 150)
    sent = await prefilled(pair.prefill, each)
    ticket_of(sent).retain()
    ticket_of(sent).release()
    ticket_of(sent)._expire()
    await check_no_blocks(pair.prefill)
    assert await decoded(pair.decode, each, sent) == await alone(pair, each)
    assert "was released at its producer" in caplog.text


async def test_ticket_of_another_prompt_is_not_read(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    each = task("mine", 150)
    sent = await prefilled(pair.prefill, task("theirs", 150, seed=9))
    assert await decoded(pair.decode, each, sent) == await alone(pair, each)
    assert "computed another prompt" in caplog.text
    await pair.check_no_blocks()


async def test_unreadable_descriptor_is_an_error(pair: Pair) -> None:
    released: list[bool] = []
    ticket = OfferedTicket("vllm.kv", b"\x93", size_bytes=0, time_limit_s=9.0, on_release=lambda: released.append(True))
    with raises(InvalidRequestError, reason="INVALID_TICKET"):
        await decoded(pair.decode, task("unreadable", 150), [Packet({}, tickets={KV_CACHE: ticket})])
    assert released


def _text(payloads: object) -> str:
    return base64.b64encode(zlib.compress(msgspec.msgpack.encode(payloads))).decode()


DAMAGED = {
    "a host": "10.0.0.7",
    "nothing": "",
    "no base64": "!!!",
    "no zlib": "AAAA",
    "another type": _text({"a": 1}),
    "no worker": _text([]),
    "another worker": _text([(0, 7, b"")]),
    "a worker without content": _text([(0, 0, b"")]),
    "a bomb": _text([(0, 0, bytes(16 << 20))]),
}


@pytest.mark.parametrize("name", DAMAGED)
async def test_damaged_handshake_does_not_fail_the_request(pair: Pair, name: str) -> None:
    each = task(f"damaged-{name}", 150, seed=len(name))
    sent = await damaged(pair.prefill, each, {"remote_host": DAMAGED[name], "remote_engine_id": name})
    assert await decoded(pair.decode, each, sent) == await alone(pair, each)
    await pair.check_no_blocks()


NUMBERS = ("remote_port", "tp_size", "dcp_size", "pp_size", "remote_num_tokens")
NAMES = ("remote_engine_id", "remote_request_id", "remote_host")
INVALID: Mapping[str, Sequence[object]] = {
    "remote_block_ids": ([], [1], [[-1]], [[1 << 31]], [[1.0]], [["1"]], {}, "1"),
    **dict.fromkeys(NAMES, ("ä", "a\n", "a" * 65_537, b"a", 1, {"a": 1})),
    **dict.fromkeys(NUMBERS, (-1, 1 << 31, 1.0, "1", True)),
}


@pytest.mark.parametrize("key", INVALID)
async def test_invalid_parameter_fails_the_request_alone(pair: Pair, key: str) -> None:
    each = task(f"invalid-{key}", 150)
    for value in (*INVALID[key], [[1], "a"], None):
        sent = await damaged(pair.prefill, each, {key: value})
        with raises(InvalidRequestError, reason="INVALID_TICKET", match=rf"\$\.parameters\.{key}"):
            await decoded(pair.decode, each, sent)
    assert await handed_over(pair, each) == await alone(pair, each)
    await pair.check_no_blocks()


WRONG: Mapping[str, Sequence[object]] = {
    "remote_block_ids": ([[]], [[1], [1]], [[0], []], [[(1 << 31) - 1] * 9]),
    "remote_num_tokens": (1, BLOCK, 699, (1 << 31) - 1),
    "tp_size": (2, 3, 1024),
    "dcp_size": (2, 3, 1024),
    "pp_size": (2, 1024),
}


@pytest.mark.parametrize("key", WRONG)
async def test_parameters_of_another_cache_do_not_end_the_engine(pair: Pair, key: str) -> None:
    for index, value in enumerate(WRONG[key]):
        each = task(f"wrong-{key}-{index}", 700, seed=index)
        sent = await damaged(pair.prefill, each, {key: value})
        assert len(await decoded(pair.decode, each, sent)) == GREEDY.max_tokens
    await pair.check_no_blocks()


async def test_handshake_that_no_ticket_can_carry_is_an_error() -> None:
    from stagemesh.services.engines.vllm.kv_handover.connector import HandshakeAnswers, handshake_text

    payloads = {(0, rank): random.Random(rank).randbytes(6 << 10) for rank in range(4)}
    answers = HandshakeAnswers(f"tcp://{handshake_text(payloads)}:5600")
    answers.send(msgspec.msgpack.encode((b"get_meta_msg", 0, 3)))
    assert msgspec.msgpack.decode(answers.recv_multipart()[0]) == payloads[0, 3]
    with pytest.raises(ValueError, match="lower tensor_parallel_size"):
        handshake_text({(0, rank): random.Random(rank).randbytes(6 << 10) for rank in range(8)})


async def test_unread_ticket_frees_its_blocks_at_once(pair: Pair) -> None:
    sent = await prefilled(pair.prefill, task("unread", 700))
    caches = controls_of(pair.prefill).caches
    with pytest.raises(NotReadyError, match="running requests use the cache"):
        await caches.clear_caches(preempt=False)
    assert ticket_of(sent).size_bytes == 6 * BLOCK * 2 * 2 * 32 * 4
    ticket_of(sent).release()
    await check_no_blocks(pair.prefill)


async def test_blocks_are_kept_for_a_second_reader(pair: Pair) -> None:
    each = task("second", 400)
    sent = await prefilled(pair.prefill, each)
    ticket_of(sent).retain()
    first = await decoded(pair.decode, each, sent)
    await check_no_blocks(pair.decode)
    # Other prompts would take the blocks if they were free.
    for seed in range(4):
        await handed_over(pair, task(f"other-{seed}", 700, seed=seed + 20))
    assert await decoded(pair.decode, each, sent) == first
    await pair.check_no_blocks()


async def test_cancelled_prefill_leaves_no_blocks(pair: Pair) -> None:
    async with aclosing(pair.prefill.submit(replace(task("cancelled", 700), wanted=frozenset({KV_CACHE})))) as events:
        async for _ in events:
            break
    await check_no_blocks(pair.prefill)


@pytest.mark.parametrize("outputs", range(3))
async def test_cancelled_decode_leaves_no_blocks(pair: Pair, outputs: int) -> None:
    each = task(f"stopped-{outputs}", 700)
    sent = await prefilled(pair.prefill, each)
    async with aclosing(pair.decode.submit(replace(each, inlets={"in": stream(sent)}))) as events:
        for _ in range(outputs):
            await anext(events)
        running = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
    if not outputs:
        # The packet was not read.
        ticket_of(sent).release()
    await pair.check_no_blocks()


async def test_short_prompt_is_not_handed_over(pair: Pair) -> None:
    each = task("short", 3)
    (usage,) = await collect(pair.prefill.submit(replace(each, wanted=frozenset({KV_CACHE}))))
    assert isinstance(usage, Usage)
    assert (usage.prompt_tokens, usage.output_tokens) == (3, 0)
    assert len(await decoded(pair.decode, each, [])) == GREEDY.max_tokens


async def test_request_resumes_from_a_checkpoint_and_a_ticket(pair: Pair) -> None:
    each = task("resumed", 300, sampling=replace(SEEDED, logprobs=None))
    sent = await prefilled(pair.prefill, each)
    events = await collect(pair.decode.submit(replace(each, inlets={"in": stream(sent)})))
    checkpoint = next(event for event in events if isinstance(event, Checkpoint))
    tokens = tokens_of(events)
    await pair.check_no_blocks()
    sent = await prefilled(pair.prefill, each)
    rest = await decoded(pair.decode, replace(each, resume_from=checkpoint), sent)
    assert [*checkpoint.token_ids, *rest] == tokens
    await pair.check_no_blocks()


async def test_adapter_applies_to_the_prompt(pair: Pair, tmp_path: Path) -> None:
    plain = task("adapter", 300)
    adapted = replace(plain, adapter="poet")
    for engine in pair:
        await controls_of(engine).adapters.load("poet", str(write_adapter(tmp_path / "poet")))
    tokens = await handed_over(pair, adapted)
    assert tokens == await alone(pair, adapted)
    assert tokens != await alone(pair, plain)
    # The decode engine does not compute the prompt: with the cache of the adapter, it samples other tokens.
    mixed = await decoded(pair.decode, plain, await prefilled(pair.prefill, adapted))
    assert mixed != await alone(pair, plain)
    await pair.check_no_blocks()


async def test_dead_prefill_engine_does_not_fail_the_request(pair: Pair) -> None:
    each = task("orphan", 700)
    expected = await alone(pair, each)
    sent = await prefilled(pair.prefill, each)
    await pair.prefill.close()
    assert await decoded(pair.decode, each, sent) == expected
    await check_no_blocks(pair.decode)
