"""A codec language model whose rows contain given frames: the talker of a tiny Qwen3-TTS, against golden codes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from stagemesh.common.errors import InvalidChunkError
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import SamplingOptions, Task
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.models.qwen3_tts.description import read_config
from stagemesh.services.models.qwen3_tts.prompt import PromptWriter, RowWriter, SpokenPrompt, make_prompt_writer
from tests.engines.vllm.codec_runs import codec_options, codes_of
from tests.engines.vllm.engines import started_with_arena
from tests.models.qwen3_tts.prompts import Request, requests, talker_rows, write_prompt

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

FRAMES = 24
OPTIONS = codec_options("qwen3_tts.talker")
BY_NAME = [request for request in requests() if "speaker" in request.options]


@pytest.fixture(scope="module")
def writer(tiny_qwen3_tts: Path) -> PromptWriter:
    return make_prompt_writer(tiny_qwen3_tts, {})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_qwen3_tts: Path) -> AsyncIterator[VllmEngine]:
    async with started_with_arena(tiny_qwen3_tts, **OPTIONS) as engine:
        yield engine


async def flow(packets: Sequence[Packet], *, cut: int) -> AsyncIterator[Packet]:
    """Yields the talker's rows in packets of at most `cut` rows."""
    for packet in packets:
        first = packet.metadata["token_start"]
        assert isinstance(first, int)
        for start in range(0, len(packet.tensors["text_ids"]), cut):
            part = {name: tensor[start : start + cut] for name, tensor in packet.tensors.items()}
            yield Packet(part, {**packet.metadata, "token_start": first + start})


def task(packets: Sequence[Packet], *, frames: int = FRAMES, cut: int = 1000, temperature: float = 0) -> Task:
    sampling = SamplingOptions(max_tokens=frames, temperature=temperature)
    inlets = {"e": flow(talker_rows(packets), cut=cut)}
    return Task("r", 7, inlets=inlets, sampling=sampling, wanted=frozenset({"codes"}))


async def frames_of(engine: VllmEngine, work: Task) -> list[list[int]]:
    frames: list[list[int]] = (await codes_of(engine, work)).tolist()
    return frames


def check(codes: list[list[int]], request: Request) -> None:
    """Asserts that codes equal those of the reference, which omits the frame of the end code."""
    assert codes[: len(request.codes)] == request.codes, request.name
    assert len(codes) <= len(request.codes) + 1


@pytest.mark.parametrize("cut", [1, 7, 1000])
async def test_codes_equal_the_reference(engine: VllmEngine, writer: PromptWriter, cut: int) -> None:
    for request in BY_NAME:
        check(await frames_of(engine, task(write_prompt(writer, request), cut=cut)), request)


async def test_requests_at_once_equal_the_reference(engine: VllmEngine, writer: PromptWriter) -> None:
    asked = [*BY_NAME, *BY_NAME]
    work = [frames_of(engine, task(write_prompt(writer, each))) for each in asked]
    for codes, request in zip(await asyncio.gather(*work), asked, strict=True):
        check(codes, request)


async def test_the_first_two_frames_end_no_speech(engine: VllmEngine, writer: PromptWriter) -> None:
    work, first = task(write_prompt(writer, BY_NAME[0])), BY_NAME[0].codes[0][0]
    ending = replace(work, sampling=replace(work.sampling, stop_token_ids=(first,)))
    codes = await frames_of(engine, ending)
    assert len(codes) >= 2
    assert first not in {codes[0][0], codes[1][0]}


@pytest.fixture(scope="module")
def clone(tiny_qwen3_tts: Path) -> Sequence[Packet]:
    """The rows of a cloned voice, with an x-vector and frames of codes."""
    noise = np.random.default_rng(0)
    config = read_config(tiny_qwen3_tts)
    frames, vector = noise.integers(0, 64, (20, 4), np.int32), noise.normal(0, 1, 64).astype(np.float32)
    return RowWriter(config).write(SpokenPrompt([5, 6, 7], range(30), frames, speaker=vector))


async def test_given_frames_do_not_depend_on_how_rows_arrive(engine: VllmEngine, clone: Sequence[Packet]) -> None:
    whole = await frames_of(engine, task(clone))
    assert await frames_of(engine, task(clone, cut=1)) == whole
    states = clone[0].tensors["states"]
    without = [Packet({**clone[0].tensors, "states": 0 * states}, clone[0].metadata), *clone[1:]]
    assert await frames_of(engine, task(without)) != whole


@pytest.mark.parametrize("temperature", [0, 0.9])
async def test_a_preempted_clone_computes_the_same_codes_again(
    engine: VllmEngine, clone: Sequence[Packet], temperature: float
) -> None:
    undisturbed = await frames_of(engine, task(clone, temperature=temperature))
    disturbed = await codes_of(engine, task(clone, temperature=temperature), preempt_after=frozenset({1, 9}))
    assert disturbed.tolist() == undisturbed


@pytest.mark.parametrize(
    ("codes", "message"),
    [
        ([[64 + 1024, -1, -1, -1]], r"group 0 of row_codes contains values outside -1 to 1087"),
        ([[0, 0, 64, 0]], r"group 2 of row_codes contains values outside -1 to 63"),
        ([[0, 0]], r"row_codes has 2 codes in each row; the model has 4"),
    ],
)
async def test_invalid_codes_are_rejected(engine: VllmEngine, codes: list[list[int]], message: str) -> None:
    rows = Packet({"text_ids": np.zeros(1, np.int32), "row_codes": np.array(codes, np.int32)}, {"token_start": 0})
    with pytest.raises(InvalidChunkError, match=message):
        await codes_of(engine, task([rows]))
