"""Embeddings from upstream, which enter a request while it runs: what comes of them is what transformers makes."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from pydantic import JsonValue

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, StagemeshError, UnavailableError
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.base import Emission, SamplingOptions, Task
from stagemesh.services.engines.vllm.engine import VllmEngine
from tests.engines.support import collect, hand_partitions, packets, stage_config
from tests.engines.tiny_model import MAX_MODEL_LEN, write_real_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

Rows = npt.NDArray[np.float32]

OPTIONS: Mapping[str, JsonValue] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 8 << 20,
    "embeddings": {"dtype": "float32"},
    "hidden_states": {"layers": ["last"], "dtype": "float32"},
}
WIDTH = 64
STEPS = 12
ADDED = 8
"""Rows that are added to those of sampled tokens, before the flow ends."""
LENGTHS = [1, 5, 33, 64, 65, 90, 120, 7]
TOLERANCE = 1e-4


class Case(NamedTuple):
    """A request's rows, and what transformers makes of them."""

    rows: Rows
    prompt_tokens: int
    tokens: list[int]
    states: Rows


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_real_model(tmp_path_factory.mktemp("real"), layers=2)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)


@pytest.fixture(scope="module")
def cases(reference: Any) -> list[Case]:
    return [_case(reference, length, seed) for seed, length in enumerate(LENGTHS)]


def _case(reference: Any, length: int, seed: int) -> Case:
    rows = np.random.default_rng(seed).normal(0, 0.05, (length + ADDED, WIDTH)).astype(np.float32)
    inputs, tokens = torch.from_numpy(rows[:length]), list[int]()
    with torch.inference_mode():
        while True:
            made = reference(inputs_embeds=inputs[None], output_hidden_states=True)
            tokens.append(int(made.logits[0, -1].argmax()))
            if len(tokens) == STEPS:
                return Case(rows, length, tokens, made.hidden_states[-1][0].numpy())
            embedding = reference.get_input_embeddings()(torch.tensor([tokens[-1]]))
            if len(inputs) < len(rows):
                embedding = embedding + torch.from_numpy(rows[len(inputs)])
            inputs = torch.cat([inputs, embedding])


@asynccontextmanager
async def running(model: Path, **options: JsonValue) -> AsyncIterator[VllmEngine]:
    plane = DataPlane(replica="tested-0", pipeline="p", generation="1", arena_bytes=64 << 20, window_bytes=8 << 20)
    engine = VllmEngine(stage_config("vllm", model=str(model), options={**OPTIONS, **options}))
    hand_partitions(engine, plane)
    try:
        await engine.start(lambda _: None)
        yield engine
    finally:
        await engine.close()
        await plane.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[VllmEngine]:
    async with running(model) as engine:
        yield engine


class Upstream:
    """A flow whose packets come when the test says so."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Packet | StagemeshError | None] = asyncio.Queue()
        self.read = 0

    def send(self, rows: Rows, start: int | None = None, prompt_tokens: int | None = None) -> None:
        said = {"token_start": start, "prompt_tokens": prompt_tokens}
        metadata = {name: value for name, value in said.items() if value is not None}
        self._queue.put_nowait(Packet({"inputs_embeds": rows}, metadata))

    def end(self, error: StagemeshError | None = None) -> None:
        self._queue.put_nowait(error)

    def __aiter__(self) -> "Upstream":
        return self

    async def __anext__(self) -> Packet:
        got = await self._queue.get()
        self.read += 1
        if got is None:
            raise StopAsyncIteration
        if isinstance(got, StagemeshError):
            raise got
        return got


def whole(case: Case, *, piece: int = 50) -> Upstream:
    """A case's flow, all there, in pieces."""
    upstream = Upstream()
    for start in range(0, len(case.rows), piece):
        upstream.send(case.rows[start : start + piece], start, case.prompt_tokens)
    upstream.end()
    return upstream


def task(upstream: AsyncIterator[Packet], *, max_tokens: int = STEPS, **edges: AsyncIterator[Packet]) -> Task:
    sampling = SamplingOptions(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Task("r", 1, sampling=sampling, inlets={"in": upstream, **edges})


async def tokens(engine: VllmEngine, wanted: Task) -> list[int]:
    return tokens_in(packets(await collect(engine.submit(wanted))))


def tokens_in(made: Sequence[Packet]) -> list[int]:
    return [int(token) for packet in made for token in packet.tensors.get("token_ids", np.zeros(0, np.int32))]


async def assert_same(engine: VllmEngine, case: Case, upstream: Upstream) -> None:
    made = packets(await collect(engine.submit(task(upstream))))
    assert tokens_in(made) == case.tokens
    states = np.concatenate([packet.tensors["hidden_states"] for packet in made if "hidden_states" in packet.tensors])
    assert states.shape == case.states.shape
    assert np.abs(states - case.states).max() < TOLERANCE


async def assert_works(engine: VllmEngine, case: Case) -> None:
    await assert_same(engine, case, whole(case))


# -- what comes of them


async def test_many_at_once_among_token_prompts(engine: VllmEngine, reference: Any, cases: list[Case]) -> None:
    prompt = [20, 30, 40]
    plain = Task("p", 1, prompt, sampling=SamplingOptions(max_tokens=STEPS, temperature=0.0, ignore_eos=True))
    *_, made = await asyncio.gather(*(assert_works(engine, case) for case in cases), tokens(engine, plain))
    expected = list(prompt)
    with torch.inference_mode():
        for _ in range(STEPS):
            expected.append(int(reference(torch.tensor([expected])).logits[0, -1].argmax()))
    assert made == expected[len(prompt) :]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(
            {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 11, "block_size": 32},
            id="chunked prefill and preemption",
        ),
        pytest.param({"tensor_parallel_size": 2}, id="tp", marks=pytest.mark.soak),
    ],
)
async def test_the_same_in_other_engines(model: Path, cases: list[Case], options: dict[str, JsonValue]) -> None:
    async with running(model, **options) as engine:
        await asyncio.gather(*(assert_same(engine, case, whole(case, piece=7)) for case in cases))


async def test_all_rows_are_the_prompt_where_they_do_not_say(engine: VllmEngine, cases: list[Case]) -> None:
    case, upstream = cases[2], Upstream()
    upstream.send(case.rows[:20])
    upstream.send(case.rows[20 : case.prompt_tokens])
    upstream.end()
    said = Upstream()
    said.send(case.rows[: case.prompt_tokens], 0, case.prompt_tokens)
    said.end()
    assert await tokens(engine, task(upstream)) == await tokens(engine, task(said))


async def test_model_computes_before_the_prompt_is_complete(engine: VllmEngine, cases: list[Case]) -> None:
    """Seen by the request's place in the engine, which it has once its first rows are there."""
    case, upstream = cases[5], Upstream()
    upstream.send(case.rows[:40], 0, case.prompt_tokens)
    running = asyncio.create_task(assert_same(engine, case, upstream))
    await until(lambda: engine.load().running == 1)
    upstream.send(case.rows[40:], 40)
    upstream.end()
    await running


async def test_a_row_that_has_not_come_parks_its_request_alone(engine: VllmEngine, cases: list[Case]) -> None:
    case, upstream = cases[1], Upstream()
    upstream.send(case.rows[: case.prompt_tokens], 0, case.prompt_tokens)
    made: list[Packet] = []
    async with aclosing(engine.submit(task(upstream))) as events:
        made += await next_token(events)
        for given in range(case.prompt_tokens, case.prompt_tokens + 2):
            waiting = asyncio.ensure_future(next_token(events))
            await assert_works(engine, cases[7])
            assert not waiting.done()
            upstream.send(case.rows[given : given + 1], given)
            made += await waiting
        upstream.send(case.rows[case.prompt_tokens + 2 :], case.prompt_tokens + 2)
        upstream.end()
        made += [event.packet async for event in events if isinstance(event, Emission)]
    assert tokens_in(made) == case.tokens


async def test_rows_after_the_last_token_are_read_and_dropped(engine: VllmEngine, cases: list[Case]) -> None:
    case = cases[3]
    upstream = whole(case, piece=1)
    assert await tokens(engine, task(upstream, max_tokens=2)) == case.tokens[:2]
    assert upstream.read == len(case.rows) + 1


async def test_rows_beyond_the_longest_request_are_dropped(engine: VllmEngine, cases: list[Case]) -> None:
    case, upstream = cases[1], Upstream()
    upstream.send(np.concatenate([case.rows, np.zeros((2 * MAX_MODEL_LEN, WIDTH), np.float32)]), 0, case.prompt_tokens)
    upstream.end()
    assert await tokens(engine, task(upstream)) == case.tokens


async def test_a_parked_request_can_be_cancelled(engine: VllmEngine, cases: list[Case]) -> None:
    case, upstream = cases[4], Upstream()
    upstream.send(case.rows[: case.prompt_tokens], 0, case.prompt_tokens)
    async with aclosing(engine.submit(task(upstream))) as events:
        await next_token(events)
    assert engine.load().running == 0
    # Its place holds nothing of it any more.
    await asyncio.gather(*(assert_works(engine, each) for each in cases))


# -- bad input


def _said(rows: Rows, start: int | None, prompt_tokens: Any = 5) -> tuple[Any, ...]:
    return rows, start, prompt_tokens


_ROWS = np.zeros((5, WIDTH), np.float32)


@pytest.mark.parametrize(
    ("sent", "error", "message"),
    [
        ([_said(_ROWS[:, :8], 0)], InvalidChunkError, r"float32\[5, 8\]; expected float32\[tokens, 64\]"),
        ([_said(_ROWS.astype(np.float16), 0)], InvalidChunkError, "is float16"),
        ([_said(_ROWS, 1)], InvalidChunkError, "go on at position 1 where 0 was to come"),
        ([_said(_ROWS, 0), _said(_ROWS, 7)], InvalidChunkError, "go on at position 7 where 5 was to come"),
        ([_said(_ROWS, 0), _said(_ROWS, 0)], InvalidChunkError, "go on at position 0 where 5 was to come"),
        ([_said(_ROWS, 0), _said(_ROWS, 5, 6)], InvalidChunkError, "prompt_tokens is 6 and was 5"),
        ([_said(_ROWS, 0, 0)], InvalidChunkError, "prompt_tokens is 0"),
        ([_said(_ROWS, 0, MAX_MODEL_LEN)], InvalidRequestError, "shorten the prompt"),
        ([_said(_ROWS, 0, MAX_MODEL_LEN - 3)], InvalidRequestError, "12 are to follow"),
        ([_said(np.zeros((MAX_MODEL_LEN, WIDTH), np.float32), 0, None)], InvalidRequestError, "shorten the prompt"),
        ([_said(_ROWS, 0, 6)], InvalidChunkError, "ended after 5 embeddings of a prompt of 6"),
        ([], InvalidRequestError, "brought no embeddings"),
    ],
)
async def test_bad_rows_fail_their_request_alone(
    engine: VllmEngine, cases: list[Case], sent: list[tuple[Any, ...]], error: type[StagemeshError], message: str
) -> None:
    upstream = Upstream()
    for rows, start, prompt_tokens in sent:
        upstream.send(rows, start, prompt_tokens)
    upstream.end()
    other = asyncio.create_task(assert_works(engine, cases[6]))
    with pytest.raises(error, match=message):
        await collect(engine.submit(task(upstream)))
    await other
    assert engine.load().running == 0


async def test_a_flow_that_fails_fails_its_request(engine: VllmEngine, cases: list[Case]) -> None:
    case, upstream = cases[4], Upstream()
    upstream.send(case.rows[: case.prompt_tokens], 0, case.prompt_tokens)
    async with aclosing(engine.submit(task(upstream))) as events:
        await next_token(events)
        upstream.end(UnavailableError("the thinker has died"))
        with pytest.raises(UnavailableError, match="the thinker has died"):
            await collect(events)


async def test_two_edges_are_refused(engine: VllmEngine, cases: list[Case]) -> None:
    with pytest.raises(InvalidRequestError, match=r"over 2 edges \(in, other\)"):
        await collect(engine.submit(task(whole(cases[0]), other=whole(cases[1]))))


async def test_drafts_and_embeddings_exclude_each_other(model: Path) -> None:
    drafts: JsonValue = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with pytest.raises(InvalidRequestError, match="leave one of them out"):
        async with running(model, speculative_config=drafts):
            pass


async def next_token(events: AsyncIterator[Any]) -> list[Packet]:
    """What comes up to the next token."""
    made: list[Packet] = []
    async for event in events:
        if isinstance(event, Emission):
            made.append(event.packet)
            if "token_ids" in event.packet.tensors:
                break
    return made


async def until(condition: Any) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.005)
