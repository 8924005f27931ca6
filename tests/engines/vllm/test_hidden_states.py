"""Hidden states that vLLM's worker writes into the arena equal those of transformers under all conditions."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from pydantic import JsonValue

from stagemesh.conformance.replicas import emptied
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Checkpoint, Emission, EngineEvent, TokenSelection
from tests.engines.support import collect, packets
from tests.engines.vllm.emitted_states import (
    HIDDEN,
    ONLY_LAST,
    PROMPTS,
    ROWS,
    Reference,
    Running,
    assert_same,
    assert_same_states,
    load_reference,
    received,
    received_all,
    reference,
    running,
    task,
)
from tests.engines.vllm.tiny_adapter import merge, write_adapter
from tests.engines.vllm.tiny_model import MODEL_LAYERS

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]

SHARE_BYTES = 64 << 10
"""The size of the memory for rows: less than the rows of one of the long prompts."""


@pytest.fixture(scope="module")
def references(deep_model: Path) -> list[Reference]:
    loaded = load_reference(deep_model)
    return [reference(loaded, prompt) for prompt in PROMPTS]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(deep_model: Path) -> AsyncIterator[Running]:
    rows: dict[str, JsonValue] = {**HIDDEN, "share_bytes": SHARE_BYTES}
    worker = "tests.engines.vllm.watching_worker.WatchingWorker"
    async with running(deep_model, hidden_states=rows, enable_lora=True, worker_cls=worker) as host:
        yield host


async def assert_all_same(host: Running, references: Sequence[Reference], **changes: Any) -> None:
    """Runs all requests at once. `changes` apply to the tasks with odd numbers."""
    tasks = [task(number, **(changes if number % 2 else {})) for number in range(len(PROMPTS))]
    for one, expected in zip(await received_all(host.engine, *tasks), references, strict=True):
        assert_same(one, expected)
    await emptied(host.used_bytes)


async def first_rows(events: AsyncGenerator[EngineEvent]) -> Packet:
    async for event in events:
        if isinstance(event, Emission) and "hidden_states" in event.packet.tensors:
            return event.packet
    raise AssertionError("the request ended without any")


async def test_states_of_sixteen_requests_equal_the_references(shared: Running, references: list[Reference]) -> None:
    before = shared.arena.rows
    await assert_all_same(shared, references)
    assert shared.arena.rows - before == ROWS


async def test_states_with_an_adapter_on_half_of_the_requests_equal_merged_weights(
    shared: Running, deep_model: Path, references: list[Reference], tmp_path: Path
) -> None:
    adapter = write_adapter(tmp_path / "poet", layers=MODEL_LAYERS)
    await shared.engine.control.adapters.load("poet", str(adapter))
    merged = merge(load_reference(deep_model), adapter)
    expected = [reference(merged, prompt) if n % 2 else references[n] for n, prompt in enumerate(PROMPTS)]
    assert expected[1].tokens != references[1].tokens
    await assert_all_same(shared, expected, adapter="poet")


async def test_last_selects_the_rows_that_tokens_follow(shared: Running, references: list[Reference]) -> None:
    before = shared.arena.rows
    got = await received(shared.engine, task(5, tokens="last"))
    assert_same(got, references[5], first=len(PROMPTS[5]) - 1)
    assert shared.arena.rows - before == len(got.states["hidden_states"])


async def test_resumed_request_does_not_read_the_prefix_cache(shared: Running, references: list[Reference]) -> None:
    """The first block, of 128 tokens, ends among the tokens that the first run sampled."""
    number, done = 11, 8
    whole = await received(shared.engine, task(number, tokens="last"))
    checkpoint = Checkpoint(done, tuple(whole.tokens[:done]))
    resumed = await received(shared.engine, task(number, tokens="last", resume_from=checkpoint))
    assert_same_states(resumed, references[number], first=len(PROMPTS[number]) - 1)
    assert whole.tokens[:done] + resumed.tokens == references[number].tokens


@pytest.mark.parametrize("tokens", ["all", "last"])
async def test_resumed_request_emits_the_rows_after_those_of_its_checkpoint(
    shared: Running, references: list[Reference], tokens: TokenSelection
) -> None:
    number, done, rows = 11, 8, 5
    checkpoint = Checkpoint(done, tuple(references[number].tokens[:done]), rows={"hidden_states": rows})
    resumed = await received(shared.engine, task(number, tokens=tokens, resume_from=checkpoint))
    first = len(PROMPTS[number]) - 1 if tokens == "last" else 0
    assert_same_states(resumed, references[number], first=first + rows)


async def test_unwanted_states_are_not_written(shared: Running) -> None:
    before = shared.arena.rows
    events = await collect(shared.engine.submit(task(2, wanted=frozenset({"text"}))))
    assert {name for packet in packets(events) for name in packet.tensors} == {"text"}
    assert shared.arena.rows == before


async def test_unread_rows_do_not_delay_other_requests(shared: Running, references: list[Reference]) -> None:
    async with AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(aclosing(shared.engine.submit(task(n)))) for n in (13, 14, 15)]
        held = [await first_rows(events) for events in slow]
        for one, expected in zip(await received_all(shared.engine), references, strict=True):
            assert_same(one, expected)
        assert shared.used_bytes() > sum(packet.size_bytes for packet in held[:1])
    del held
    await emptied(shared.used_bytes)


async def test_cancelled_request_frees_its_rows(shared: Running) -> None:
    async with aclosing(shared.engine.submit(task(15))) as events:
        assert await first_rows(events)
    await emptied(shared.used_bytes)


async def test_pooler_output_is_unchanged(shared: Running) -> None:
    """A generating model has no pooler output; `test_pooling` tests a model that has one."""
    await collect(shared.engine.submit(task(0)))
    (pooled,) = await shared.engine.control.llm.collective_rpc("pooler_outputs")
    assert pooled
    assert all(not one for one in pooled)


DRAFTS: JsonValue = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
CHUNKED: dict[str, JsonValue] = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}


@pytest.mark.parametrize(
    ("options", "repeats"),
    [
        # The cache has space to start a few requests, but not for their full length: some are preempted and restart.
        pytest.param({"block_size": 32, "num_gpu_blocks_override": 11}, True, id="preempted"),
        # A draft's row is written before it is known to be rejected.
        pytest.param({"speculative_config": DRAFTS}, True, id="drafts"),
        # Only one of two workers writes.
        pytest.param({"tensor_parallel_size": 2, **CHUNKED}, False, id="tp-chunked"),
        pytest.param({"pipeline_parallel_size": 2, "hidden_states": ONLY_LAST}, False, id="pp", marks=pytest.mark.soak),
    ],
)
async def test_states_are_the_same_with_other_options(
    deep_model: Path, references: list[Reference], options: dict[str, JsonValue], *, repeats: bool
) -> None:
    async with running(deep_model, **options) as host:
        await assert_all_same(host, references)
        assert host.arena.rows > ROWS if repeats else host.arena.rows == ROWS


@pytest.mark.skipif(
    "amx_tile" in Path("/proc/cpuinfo").read_text(),
    reason="vLLM's attention in bfloat16 uses AMX, whose instructions some virtual machines reject (SIGILL)",
)
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.soak), "bfloat16"])
async def test_states_of_a_bfloat16_model_are_exact(deep_model: Path, references: list[Reference], dtype: str) -> None:
    async with running(deep_model, dtype="bfloat16", hidden_states={**HIDDEN, "dtype": dtype}) as host:
        for one, expected, prompt in zip(await received_all(host.engine), references, PROMPTS, strict=True):
            for name, states in one.states.items():
                assert not (states.view(np.uint32) & 0xFFFF).any(), "more precise than the model"
                assert np.abs(states[: len(prompt)] - expected.states[name][: len(prompt)]).max() < 0.1
