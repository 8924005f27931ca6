"""A codec language model with one code for each frame: the talker of a tiny Qwen2.5-Omni, against transformers."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.wire.tensors import Array
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import SamplingOptions, Task
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.models.qwen2_5_omni.transforms import Thinker2Talker
from tests.engines.vllm.codec_runs import check_resumed, codec_options, codes_of
from tests.engines.vllm.engines import started_with_arena
from tests.models.qwen2_5_omni.reference import Reference
from tests.models.qwen3_omni.reference import Conversation, Result

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

TOKENS = 24
TEXTS = ["Hello there", "What is the sea?", "one two three four five six seven eight nine ten"]
OPTIONS = codec_options("qwen2_5_omni.talker")


@dataclass(frozen=True)
class Answer:
    """An answer of transformers, and the thinker's states of all tokens except the last one, [tokens, width]."""

    result: Result
    states: Array


@pytest.fixture(scope="module")
def expected(tiny_qwen2_5_omni: Path) -> Sequence[Answer]:
    reference = Reference(tiny_qwen2_5_omni)
    answers: list[Answer] = []
    for text in TEXTS:
        conversation = Conversation([{"role": "user", "content": text}])
        result = reference.generate(conversation, text_tokens=12, codec_tokens=TOKENS)
        answers.append(Answer(result, _states(reference.model.thinker, result)))
    return answers


def _states(thinker: Any, result: Result) -> Array:
    import torch

    ids = np.concatenate([result.prompt_ids, result.text_ids])[None, :-1]
    with torch.inference_mode():
        made = thinker(torch.from_numpy(ids), attention_mask=torch.ones(ids.shape), output_hidden_states=True)
    return np.asarray(made.hidden_states[-1][0], np.float32)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_qwen2_5_omni: Path) -> AsyncIterator[VllmEngine]:
    async with started_with_arena(tiny_qwen2_5_omni, **OPTIONS) as engine:
        yield engine


def arrivals(answer: Answer, *, cut: int, early: bool) -> list[Packet]:
    """Returns the thinker's packets with `cut` rows each. If `early`, tokens arrive before the states of the last."""
    prompt, text = (ids.astype(np.int32) for ids in (answer.result.prompt_ids, answer.result.text_ids))
    packets = [Packet({"prompt_ids": prompt})]
    if early:
        packets.append(Packet({"token_ids": text}))
    for start in range(0, len(answer.states), cut):
        states = answer.states[start : start + cut]
        places = np.arange(start, start + len(states), dtype=np.int32)
        tensors: dict[str, Array] = {"hidden_states": states, "positions": np.repeat(places[:, None], 3, 1)}
        if not early:
            sampled = places[places >= len(prompt) - 1] - (len(prompt) - 1)
            tensors["token_ids"] = text[sampled]
        packets.append(Packet(tensors, {"token_start": start}))
    return packets


async def rows_of(model: Path, answer: Answer, *, cut: int, early: bool) -> AsyncIterator[Packet]:
    transform = Thinker2Talker(model)
    for packet in arrivals(answer, cut=cut, early=early):
        for rows in transform.push(packet):
            yield rows
    for rows in transform.finish():
        yield rows


def task(model: Path, answer: Answer, *, cut: int = 1, early: bool = False, speaker: str = "Ethan") -> Task:
    sampling = SamplingOptions(max_tokens=TOKENS, temperature=0.0)
    flow = rows_of(model, answer, cut=cut, early=early)
    return Task("r", 7, inlets={"e": flow}, sampling=sampling, options={"speaker": speaker})


def check(codes: Array, answer: Answer) -> None:
    """Checks that the codes are those of transformers, which lack the code of the end."""
    expected = answer.result.codes.tolist()
    assert codes[: len(expected)].tolist() == expected
    assert len(codes) - len(expected) == (len(expected) < TOKENS)


@pytest.mark.parametrize("early", [False, True], ids=["in step", "early tokens"])
@pytest.mark.parametrize("cut", [1, 3, 100])
async def test_codes_equal_transformers(
    engine: VllmEngine, tiny_qwen2_5_omni: Path, expected: Sequence[Answer], cut: int, early: bool
) -> None:
    for answer in expected:
        check(await codes_of(engine, task(tiny_qwen2_5_omni, answer, cut=cut, early=early)), answer)
        assert len(set(answer.result.codes[:, 0].tolist())) >= 8


async def test_requests_at_once_equal_transformers(
    engine: VllmEngine, tiny_qwen2_5_omni: Path, expected: Sequence[Answer]
) -> None:
    answers = [*expected, *expected, *expected]
    made = await asyncio.gather(*(codes_of(engine, task(tiny_qwen2_5_omni, answer)) for answer in answers))
    for codes, answer in zip(made, answers, strict=True):
        check(codes, answer)


async def test_a_resumed_request_continues_with_the_same_codes(
    engine: VllmEngine, tiny_qwen2_5_omni: Path, expected: Sequence[Answer]
) -> None:
    answer = max(expected, key=lambda each: len(each.result.codes))
    await check_resumed(engine, lambda: task(tiny_qwen2_5_omni, answer))


async def test_the_speaker_changes_the_codes(
    engine: VllmEngine, tiny_qwen2_5_omni: Path, expected: Sequence[Answer]
) -> None:
    spoken = [
        [(await codes_of(engine, task(tiny_qwen2_5_omni, each, speaker=name))).tolist() for each in expected]
        for name in ("chelsie", "Ethan")
    ]
    assert spoken[0] != spoken[1]


async def test_an_unknown_speaker_is_rejected(
    engine: VllmEngine, tiny_qwen2_5_omni: Path, expected: Sequence[Answer]
) -> None:
    with pytest.raises(InvalidRequestError, match="no speaker 'Nobody'; choose one of: chelsie, ethan"):
        await codes_of(engine, task(tiny_qwen2_5_omni, expected[0], speaker="Nobody"))
