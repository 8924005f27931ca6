"""Embeddings from upstream that enter a request while it runs, compared with transformers."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from pydantic import JsonValue

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, StagemeshError, UnavailableError
from stagemesh.conformance.replicas import until
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Emission, SamplingOptions, Task
from stagemesh.services.engines.prompts import RawPrompt
from stagemesh.services.engines.vllm.engine import VllmEngine
from tests.engines.support import OpenEdge, collect, packets, sampled_tokens
from tests.engines.vllm.emitted_states import ONLY_LAST, TOLERANCE, greedy, load_reference
from tests.engines.vllm.engines import started_with_arena
from tests.engines.vllm.tiny_model import FLOAT32, MAX_MODEL_LEN, write_real_model
from tests.module_fixtures import made_for_module

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

Rows = npt.NDArray[np.float32]

OPTIONS: Mapping[str, JsonValue] = {**FLOAT32, "embeddings": {"dtype": "float32"}, "hidden_states": ONLY_LAST}
WIDTH = 64
STEPS = 12
ADDED = 8
"""The number of rows that are added to embeddings of sampled tokens before the flow ends."""
LENGTHS = [1, 5, 33, 64, 65, 90, 120, 7]


class Case(NamedTuple):
    """A request's rows and transformers' results for them."""

    rows: Rows
    prompt_tokens: int
    tokens: list[int]
    states: Rows


model = made_for_module(write_real_model)


@pytest.fixture(scope="module")
def reference(model: Path) -> Any:
    return load_reference(model)


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


def running(model: Path, **options: JsonValue) -> AbstractAsyncContextManager[VllmEngine]:
    """Runs an engine with `OPTIONS` and the changed `options`."""
    return started_with_arena(model, **{**OPTIONS, **options})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[VllmEngine]:
    async with running(model) as engine:
        yield engine


class Upstream(OpenEdge):
    """An incoming edge with rows of embeddings."""

    def bring(self, rows: Rows, start: int | None = None, prompt_tokens: int | None = None) -> None:
        said = {"token_start": start, "prompt_tokens": prompt_tokens}
        metadata = {name: value for name, value in said.items() if value is not None}
        self.send(Packet({"inputs_embeds": rows}, metadata))


def prompted(case: Case) -> Upstream:
    """Returns an edge over which the rows of a case's prompt have arrived."""
    upstream = Upstream()
    upstream.bring(case.rows[: case.prompt_tokens], 0, case.prompt_tokens)
    return upstream


def whole(case: Case, *, rows: int = 50) -> Upstream:
    """Returns a case's complete flow, in packets of at most `rows` rows."""
    upstream = Upstream()
    for start in range(0, len(case.rows), rows):
        upstream.bring(case.rows[start : start + rows], start, case.prompt_tokens)
    upstream.end()
    return upstream


def task(upstream: AsyncIterator[Packet], *, max_tokens: int = STEPS, **edges: AsyncIterator[Packet]) -> Task:
    sampling = SamplingOptions(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Task("r", 1, sampling=sampling, inlets={"in": upstream, **edges})


def tokens_in(made: Sequence[Packet]) -> list[int]:
    return [int(token) for packet in made for token in packet.tensors.get("token_ids", np.zeros(0, np.int32))]


async def assert_same(engine: VllmEngine, case: Case, upstream: Upstream | None = None) -> None:
    made = packets(await collect(engine.submit(task(upstream or whole(case)))))
    assert tokens_in(made) == case.tokens
    states = np.concatenate([packet.tensors["hidden_states"] for packet in made if "hidden_states" in packet.tensors])
    assert states.shape == case.states.shape
    assert np.abs(states - case.states).max() < TOLERANCE


# -- results


async def test_many_requests_among_token_prompts(engine: VllmEngine, reference: Any, cases: list[Case]) -> None:
    prompt = [20, 30, 40]
    plain = replace(task(Upstream()), prompt=RawPrompt(prompt), inlets={})
    *_, made = await asyncio.gather(*(assert_same(engine, case) for case in cases), sampled_tokens(engine, plain))
    assert made == greedy(reference, prompt, steps=STEPS)


SMALL = {"max_num_batched_tokens": 64, "num_gpu_blocks_override": 11, "block_size": 32}
"""Options with which prefills are split, and requests are preempted."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(SMALL, id="chunked prefill and preemption"),
        pytest.param({"tensor_parallel_size": 2}, id="tp", marks=pytest.mark.soak),
    ],
)
async def test_other_options_change_no_result(model: Path, cases: list[Case], options: dict[str, JsonValue]) -> None:
    async with running(model, **options) as engine:
        await asyncio.gather(*(assert_same(engine, case, whole(case, rows=7)) for case in cases))


async def test_all_rows_are_the_prompt_without_metadata(engine: VllmEngine, cases: list[Case]) -> None:
    case, upstream = cases[2], Upstream()
    upstream.bring(case.rows[:20])
    upstream.bring(case.rows[20 : case.prompt_tokens])
    upstream.end()
    said = prompted(case)
    said.end()
    assert await sampled_tokens(engine, task(upstream)) == await sampled_tokens(engine, task(said))


async def test_model_computes_before_the_prompt_is_complete(engine: VllmEngine, cases: list[Case]) -> None:
    """The request is in the engine once its first rows have arrived."""
    case, upstream = cases[5], Upstream()
    upstream.bring(case.rows[:40], 0, case.prompt_tokens)
    running = asyncio.create_task(assert_same(engine, case, upstream))
    await until(lambda: engine.load().running == 1, timeout_s=20)
    upstream.bring(case.rows[40:], 40)
    upstream.end()
    await running


async def test_missing_row_parks_its_request_alone(engine: VllmEngine, cases: list[Case]) -> None:
    case, upstream = cases[1], prompted(cases[1])
    made: list[Packet] = []
    async with aclosing(engine.submit(task(upstream))) as events:
        made += await next_token(events)
        for given in range(case.prompt_tokens, case.prompt_tokens + 2):
            waiting = asyncio.ensure_future(next_token(events))
            await assert_same(engine, cases[7])
            assert not waiting.done()
            upstream.bring(case.rows[given : given + 1], given)
            made += await waiting
        upstream.bring(case.rows[case.prompt_tokens + 2 :], case.prompt_tokens + 2)
        upstream.end()
        made += [event.packet async for event in events if isinstance(event, Emission)]
    assert tokens_in(made) == case.tokens


async def test_rows_after_the_last_token_are_read_and_dropped(engine: VllmEngine, cases: list[Case]) -> None:
    case = cases[3]
    upstream = whole(case, rows=1)
    assert await sampled_tokens(engine, task(upstream, max_tokens=2)) == case.tokens[:2]
    assert upstream.read == len(case.rows) + 1


async def test_rows_beyond_the_longest_request_are_dropped(engine: VllmEngine, cases: list[Case]) -> None:
    case, upstream = cases[1], Upstream()
    upstream.bring(np.concatenate([case.rows, np.zeros((2 * MAX_MODEL_LEN, WIDTH), np.float32)]), 0, case.prompt_tokens)
    upstream.end()
    assert await sampled_tokens(engine, task(upstream)) == case.tokens


async def test_parked_request_can_be_cancelled(engine: VllmEngine, cases: list[Case]) -> None:
    async with aclosing(engine.submit(task(prompted(cases[4])))) as events:
        await next_token(events)
    assert engine.load().running == 0
    # Its slot is empty again.
    await asyncio.gather(*(assert_same(engine, each) for each in cases))


# -- bad input


_ROWS = np.zeros((5, WIDTH), np.float32)


@pytest.mark.parametrize(
    ("sent", "error", "message"),
    [
        ([(_ROWS[:, :8], 0, 5)], InvalidChunkError, r"float32\[5, 8\]; expected float32\[tokens, 64\]"),
        ([(_ROWS.astype(np.float16), 0, 5)], InvalidChunkError, "is float16"),
        ([(_ROWS, 1, 5)], InvalidChunkError, "continue at position 1 instead of 0"),
        ([(_ROWS, 0, 5), (_ROWS, 7, 5)], InvalidChunkError, "continue at position 7 instead of 5"),
        ([(_ROWS, 0, 5), (_ROWS, 0, 5)], InvalidChunkError, "continue at position 0 instead of 5"),
        ([(_ROWS, 0, 5), (_ROWS, 5, 6)], InvalidChunkError, "prompt_tokens is 6 and was 5"),
        ([(_ROWS, 0, 0)], InvalidChunkError, "prompt_tokens is 0"),
        ([(_ROWS, 0, MAX_MODEL_LEN)], InvalidRequestError, "shorten the prompt"),
        ([(np.zeros((MAX_MODEL_LEN, WIDTH), np.float32), 0, None)], InvalidRequestError, "shorten the prompt"),
        ([(_ROWS, 0, 6)], InvalidChunkError, "ended after 5 of 6 embeddings"),
        ([], InvalidRequestError, "delivered no embeddings"),
    ],
)
async def test_bad_rows_fail_their_request_alone(
    engine: VllmEngine, cases: list[Case], sent: list[tuple[Any, ...]], error: type[StagemeshError], message: str
) -> None:
    upstream = Upstream()
    for rows, start, prompt_tokens in sent:
        upstream.bring(rows, start, prompt_tokens)
    upstream.end()
    other = asyncio.create_task(assert_same(engine, cases[6]))
    with pytest.raises(error, match=message):
        await collect(engine.submit(task(upstream)))
    await other
    assert engine.load().running == 0


async def test_failed_flow_fails_its_request(engine: VllmEngine, cases: list[Case]) -> None:
    upstream = prompted(cases[4])
    async with aclosing(engine.submit(task(upstream))) as events:
        await next_token(events)
        upstream.end(UnavailableError("the thinker has died"))
        with pytest.raises(UnavailableError, match="the thinker has died"):
            await collect(events)


async def test_two_edges_are_rejected(engine: VllmEngine, cases: list[Case]) -> None:
    with pytest.raises(InvalidRequestError, match=r"over 2 edges \(in, other\)"):
        await collect(engine.submit(task(whole(cases[0]), other=whole(cases[1]))))


async def test_drafts_and_embeddings_exclude_each_other(model: Path) -> None:
    drafts: JsonValue = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    with pytest.raises(InvalidRequestError, match="omit it"):
        async with running(model, speculative_config=drafts):
            pass


async def next_token(events: AsyncIterator[Any]) -> list[Packet]:
    """Returns the packets up to and including the next token."""
    made: list[Packet] = []
    async for event in events:
        if isinstance(event, Emission):
            made.append(event.packet)
            if "token_ids" in event.packet.tensors:
                break
    return made
