"""Hidden states that leave vLLM's worker for the arena: they are those of transformers, whatever else happens."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
import pytest_asyncio
import torch
from pydantic import JsonValue

from stagemesh.connectors.base import Packet
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.errors import InvalidRequestError
from stagemesh.services.engines.base import SamplingOptions, Task
from stagemesh.services.engines.vllm.engine import VllmEngine
from tests.engines.support import collect, packets, stage_config
from tests.engines.tiny_model import write_real_model

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

LAYERS = {"hidden_states": -1, "hidden_states_1": 1, "hidden_states_2": 2}
"""What is asked for, and its place among transformers' `hidden_states`."""
HIDDEN: JsonValue = {"layers": ["last", 1, 2], "dtype": "float32"}
OPTIONS: Mapping[str, JsonValue] = {"kv_cache_memory_bytes": 8 << 20, "dtype": "float32", "hidden_states": HIDDEN}
TOLERANCE = 1e-4
PROMPTS = [[10 + (7 * number + at) % 200 for at in range(3 + 11 * number)] for number in range(16)]
STEPS = 12


class Reference(NamedTuple):
    """What transformers makes of a prompt."""

    tokens: list[int]
    states: Mapping[str, npt.NDArray[np.float32]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_real_model(tmp_path_factory.mktemp("real"), layers=4)


@pytest.fixture(scope="module")
def references(model: Path) -> list[Reference]:
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return [_reference(reference, prompt) for prompt in PROMPTS]


def _reference(reference: torch.nn.Module, prompt: Sequence[int]) -> Reference:
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(STEPS):
            ids.append(int(reference(torch.tensor([ids])).logits[0, -1].argmax()))
        states = reference(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
    return Reference(ids[len(prompt) :], {name: states[at][0].numpy() for name, at in LAYERS.items()})


@asynccontextmanager
async def running(model: Path, **options: JsonValue) -> AsyncGenerator[VllmEngine]:
    plane = DataPlane(replica="tested-0", pipeline="p", generation="1", arena_bytes=64 << 20, window_bytes=8 << 20)
    engine = VllmEngine(stage_config("vllm", model=str(model), options={**OPTIONS, **options}))
    engine.use_shares(plane)
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


def task(number: int, **changes: object) -> Task:
    sampling = SamplingOptions(max_tokens=STEPS, temperature=0.0)
    return Task(f"r{number}", 1, PROMPTS[number], sampling=sampling, **changes)  # type: ignore[arg-type]


class Received(NamedTuple):
    """A request's rows, put together."""

    starts: list[int]
    states: Mapping[str, npt.NDArray[np.float32]]


async def received(engine: VllmEngine, wanted: Task) -> Received:
    rows = [one for one in packets(await collect(engine.submit(wanted))) if "hidden_states" in one.tensors]
    starts = [int(one.metadata["token_start"]) for one in rows]
    names = [name for name in LAYERS if name in rows[0].tensors]
    return Received(starts, {name: np.concatenate([_floats(one, name) for one in rows]) for name in names})


def _floats(packet: Packet, name: str) -> npt.NDArray[np.float32]:
    return packet.tensors[name].view(np.float32)


def assert_same(got: Received, reference: Reference, *, first: int = 0) -> None:
    assert got.starts[0] == first
    assert sorted(got.starts) == got.starts
    assert "hidden_states" in got.states
    for name, states in got.states.items():
        expected = reference.states[name][first:]
        assert states.shape == expected.shape
        assert np.abs(states - expected).max() < TOLERANCE, name


async def assert_all_same(engine: VllmEngine, references: Sequence[Reference]) -> None:
    got = await asyncio.gather(*(received(engine, task(number)) for number in range(len(PROMPTS))))
    for one, reference in zip(got, references, strict=True):
        assert_same(one, reference)


async def test_states_of_sixteen_requests_equal_those_of_transformers(
    engine: VllmEngine, references: list[Reference]
) -> None:
    await assert_all_same(engine, references)


async def test_last_takes_only_rows_that_tokens_are_sampled_from(
    engine: VllmEngine, references: list[Reference]
) -> None:
    got = await received(engine, task(5, tokens="last"))
    assert_same(got, references[5], first=len(PROMPTS[5]) - 1)


async def test_nothing_is_emitted_that_nobody_takes(engine: VllmEngine) -> None:
    events = await collect(engine.submit(task(2, wanted=frozenset({"text"}))))
    assert {name for packet in packets(events) for name in packet.tensors} <= {"text", "token_ids"}


async def test_states_are_the_same_with_a_prefill_cut_into_pieces(model: Path, references: list[Reference]) -> None:
    options: dict[str, JsonValue] = {"enable_chunked_prefill": True, "max_num_batched_tokens": 64}
    async with running(model, **options) as engine:
        await assert_all_same(engine, references)


async def test_states_are_the_same_after_preemptions(model: Path, references: list[Reference]) -> None:
    # Room for a few of the requests at once: the others are put off, and some begin again.
    async with running(model, num_gpu_blocks_override=16) as engine:
        await assert_all_same(engine, references)


async def test_a_layer_that_the_model_has_not_is_refused(model: Path) -> None:
    with pytest.raises(InvalidRequestError, match="layers 0 to 3"):
        async with running(model, hidden_states={"layers": [4]}):
            pass


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"tensor_parallel_size": 2}, id="tp"),
        pytest.param({"pipeline_parallel_size": 2, "hidden_states": {"layers": ["last"], "dtype": "float32"}}, id="pp"),
    ],
)
async def test_states_are_the_same_over_two_workers(
    model: Path, references: list[Reference], options: dict[str, JsonValue]
) -> None:
    async with running(model, **options) as engine:
        await assert_all_same(engine, references)


async def test_states_of_rejected_drafts_are_not_taken(model: Path, references: list[Reference]) -> None:
    drafts: JsonValue = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    async with running(model, speculative_config=drafts) as engine:
        await assert_all_same(engine, references)
