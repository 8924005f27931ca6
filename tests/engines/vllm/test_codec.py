"""A codec language model in the vllm engine: the talker of a tiny Qwen3-Omni, compared with transformers."""

import asyncio
import json
import re
import shutil
import weakref
from collections.abc import AsyncIterable, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from safetensors.numpy import load_file, save_file

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, NotReadyError
from stagemesh.common.wire.tensors import Array
from stagemesh.conformance.replicas import until
from stagemesh.connectors.arena.memory import PAGE_BYTES
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Emission, EngineEvent, SamplingOptions, Task, Usage
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.models.qwen3_omni.transforms import Thinker2Talker
from tests.engines.vllm.codec_runs import check_resumed, codec_options, codes_of
from tests.engines.vllm.engines import started
from tests.models.qwen3_omni.reference import Conversation, Reference, Result

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

TOKENS = 24
TEXTS = ["Hello there", "What is the sea?", "a", "one two three four five six seven eight nine ten"]
OPTIONS = codec_options("qwen3_omni.talker")


@pytest.fixture(scope="module")
def expected(tiny_qwen3_omni: Path) -> Sequence[Result]:
    reference = Reference(tiny_qwen3_omni)
    conversations = [Conversation([{"role": "user", "content": text}]) for text in TEXTS]
    return [reference.generate(each, text_tokens=12, codec_tokens=TOKENS) for each in conversations]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plane() -> AsyncIterator[DataPlane]:
    plane = DataPlane(replica="a-0", pipeline="p", generation="1")
    yield plane
    await plane.close()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tiny_qwen3_omni: Path, plane: DataPlane) -> AsyncIterator[VllmEngine]:
    async with started(tiny_qwen3_omni, plane.arena, **OPTIONS) as engine:
        yield engine


async def rows_of(model: Path, result: Result, *, cut: int) -> AsyncIterator[Packet]:
    """Yields the talker's rows for an answer of the thinker that arrives `cut` tokens at a time."""
    transform = Thinker2Talker(model)
    arrived = [Packet({"prompt_ids": result.prompt_ids.astype(np.int32)})]
    text = result.text_ids.astype(np.int32)
    arrived += [Packet({"token_ids": text[start : start + cut]}) for start in range(0, len(text), cut)]
    for packet in arrived:
        for rows in transform.push(packet):
            yield rows
    for rows in transform.finish():
        yield rows


async def first_emission(events: AsyncIterator[EngineEvent]) -> None:
    """Waits for the first emission and drops it."""
    async for event in events:
        if isinstance(event, Emission):
            return


async def endless(flow: AsyncIterable[Packet]) -> AsyncIterator[Packet]:
    """Yields the packets of a flow, then waits until it is closed."""
    async for packet in flow:
        yield packet
    await asyncio.Event().wait()


def task(
    model: Path, result: Result, *, cut: int = 1, temperature: float = 0.0, tokens: int = TOKENS, speaker: str = "Ethan"
) -> Task:
    sampling = SamplingOptions(max_tokens=tokens, min_tokens=tokens if temperature else 0, temperature=temperature)
    flow = rows_of(model, result, cut=cut)
    wanted = frozenset({"codes"})
    return Task("r", 7, inlets={"e": flow}, sampling=sampling, options={"speaker": speaker}, wanted=wanted)


def check(codes: Array, expected: Result) -> None:
    """Asserts that codes equal those of transformers, which omits the frame of the end code or of the last token."""
    assert codes[:-1].tolist() == expected.codes.tolist()


@pytest.mark.parametrize("cut", [1, 3, 100])
async def test_codes_equal_transformers(
    engine: VllmEngine, tiny_qwen3_omni: Path, expected: Sequence[Result], cut: int
) -> None:
    for result in expected:
        check(await codes_of(engine, task(tiny_qwen3_omni, result, cut=cut)), result)


async def test_requests_at_once_equal_transformers(
    engine: VllmEngine, tiny_qwen3_omni: Path, expected: Sequence[Result]
) -> None:
    made = await asyncio.gather(*(codes_of(engine, task(tiny_qwen3_omni, each)) for each in [*expected, *expected]))
    for codes, result in zip(made, [*expected, *expected], strict=True):
        check(codes, result)


async def test_a_preempted_request_computes_the_same_codes_again(
    engine: VllmEngine, tiny_qwen3_omni: Path, expected: Sequence[Result]
) -> None:
    codes = await codes_of(engine, task(tiny_qwen3_omni, expected[3]), preempt_after=frozenset({1, 9}))
    check(codes, expected[3])


async def test_random_codes_depend_on_the_seed_alone(
    engine: VllmEngine, tiny_qwen3_omni: Path, expected: Sequence[Result]
) -> None:
    work = [task(tiny_qwen3_omni, expected[0], temperature=0.9) for _ in range(3)]
    alone = await codes_of(engine, work[0])
    others = [codes_of(engine, task(tiny_qwen3_omni, each, temperature=0.9)) for each in expected[1:]]
    together, *_ = await asyncio.gather(codes_of(engine, work[1]), *others)
    other_seed = await codes_of(engine, replace(work[2], seed=8))
    assert together.tolist() == alone.tolist() != other_seed.tolist()
    assert alone[:-1].tolist() != expected[0].codes.tolist()


@pytest.mark.usefixtures("no_collector")
async def test_an_aborted_request_and_its_unread_frames_are_freed_at_once(
    engine: VllmEngine, plane: DataPlane, tiny_qwen3_omni: Path, expected: Sequence[Result]
) -> None:
    whole = task(tiny_qwen3_omni, expected[3], temperature=0.9)
    work = replace(whole, inlets={"e": endless(whole.inlets["e"])})
    known = weakref.ref(work)
    async with aclosing(engine.submit(work)) as events:
        await first_emission(events)
        # The engine computes further frames meanwhile.
        await until(lambda: plane.arena.used_bytes >= 4 * PAGE_BYTES, timeout_s=10)
    del work
    await until(lambda: not plane.arena.used_bytes, timeout_s=5)
    assert known() is None


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_a_resumed_request_continues_with_the_same_codes(
    engine: VllmEngine, tiny_qwen3_omni: Path, expected: Sequence[Result], temperature: float
) -> None:
    await check_resumed(engine, lambda: task(tiny_qwen3_omni, expected[1], temperature=temperature))


async def test_the_speaker_changes_the_codes(
    engine: VllmEngine, tiny_qwen3_omni: Path, expected: Sequence[Result]
) -> None:
    codes = await codes_of(engine, task(tiny_qwen3_omni, expected[0], speaker="chelsie"))
    assert codes[:-1].tolist() != expected[0].codes.tolist()


async def test_an_unknown_speaker_is_rejected(
    engine: VllmEngine, tiny_qwen3_omni: Path, expected: Sequence[Result]
) -> None:
    with pytest.raises(InvalidRequestError, match="no speaker 'Nobody'; choose one of: aiden, chelsie, ethan"):
        await codes_of(engine, task(tiny_qwen3_omni, expected[0], speaker="Nobody"))


async def test_the_end_code_ends_the_request(
    engine: VllmEngine, tiny_qwen3_omni: Path, expected: Sequence[Result]
) -> None:
    finishes = dict[bool, str]()
    for result in expected:
        work = task(tiny_qwen3_omni, result)
        usages = [event async for event in engine.submit(work) if isinstance(event, Usage)]
        finishes[len(result.codes) < TOKENS - 1] = usages[-1].finish.reason
    assert finishes == {True: "end", False: "length"}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"text_ids": np.array([100_000], np.int32)}, "text_ids contains values outside -1 to"),
        ({"codec_slots": np.array([9], np.int8)}, "codec_slots contains values outside -1 to 5"),
        ({"positions": np.zeros((1, 2), np.int32)}, "positions"),
        ({"states": np.zeros((1, 3), np.float32)}, "states"),
    ],
)
async def test_invalid_rows_are_rejected(engine: VllmEngine, changed: Mapping[str, Array], message: str) -> None:
    rows: dict[str, Array] = {
        "text_ids": np.zeros(1, np.int32),
        "codec_slots": np.full(1, -1, np.int8),
        "positions": np.zeros((1, 3), np.int32),
    }

    async def flow() -> AsyncIterator[Packet]:
        yield Packet({**rows, **changed})

    with pytest.raises(InvalidChunkError, match=message):
        await codes_of(engine, Task("r", 1, inlets={"e": flow()}, sampling=SamplingOptions(max_tokens=2)))


async def load_failure(model: Path) -> str:
    """Returns the message with which an engine rejects a model."""
    with pytest.raises(NotReadyError) as caught:
        async with started(model, **OPTIONS):
            pass
    assert caught.value.reason == "LOAD_FAILED"
    return caught.value.message


def changed_weights(model: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """Returns a copy of a model whose weights `change` has changed, by name."""
    copied = Path(shutil.copytree(model, folder / "model"))
    weights = load_file(copied / "model.safetensors")
    change(weights)
    save_file(weights, copied / "model.safetensors")
    return copied


async def test_missing_and_unknown_weights_are_named(tiny_qwen3_omni: Path, tmp_path: Path) -> None:
    def rename(weights: dict[str, Any]) -> None:
        weights["talker.model.layers.7.x"] = weights.pop("talker.model.layers.1.mlp.experts.3.up_proj.weight")

    message = await load_failure(changed_weights(tiny_qwen3_omni, tmp_path, rename))
    missing = "talker.model.layers.1.mlp.experts.3.up_proj.weight"
    assert f"missing: {missing}; unknown: talker.model.layers.7.x" in message


async def test_a_weight_that_lacks_a_part_is_named(tiny_qwen3_omni: Path, tmp_path: Path) -> None:
    """vLLM itself would compute with arbitrary embeddings of text."""
    name = "thinker.model.embed_tokens.weight"
    message = await load_failure(changed_weights(tiny_qwen3_omni, tmp_path, lambda weights: weights.pop(name)))
    assert re.search(r"lacks parts of weights, .*: text_embedding\.weight", message)


@pytest.mark.parametrize("section", ["talker_config", "thinker_config"])
async def test_a_config_without_a_section_is_rejected(tiny_qwen3_omni: Path, tmp_path: Path, section: str) -> None:
    config = json.loads((tiny_qwen3_omni / "config.json").read_text())
    del config[section]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert f"has no {section}" in await load_failure(tmp_path)


async def test_a_model_that_does_not_exist_is_rejected(tmp_path: Path) -> None:
    assert "absent does not exist" in await load_failure(tmp_path / "absent")


async def test_weights_that_do_not_fit_the_config_are_explained(tiny_qwen3_omni: Path, tmp_path: Path) -> None:
    def shorten(weights: dict[str, Any]) -> None:
        weights["talker.model.norm.weight"] = weights["talker.model.norm.weight"][:30]

    message = await load_failure(changed_weights(tiny_qwen3_omni, tmp_path, shorten))
    assert re.search(r"vLLM cannot load .*Error: .*30", message)
