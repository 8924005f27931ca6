"""Codec language models in the vllm engine: talkers of tiny models, compared with the reference implementations."""

import asyncio
import json
import shutil
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import pytest_asyncio
import torch
from pydantic import JsonValue

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, NotReadyError
from stagemesh.common.wire.tensors import Array
from stagemesh.conformance.replicas import until
from stagemesh.connectors.arena.memory import PAGE_BYTES
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Checkpoint, Emission, SamplingOptions, Task
from stagemesh.services.engines.vllm.codec.feature import EmittedFrames
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.engines.vllm.features import EngineRequest, RequestPrompt
from stagemesh.services.engines.vllm.requests import CheckedParams
from stagemesh.services.models.qwen2_5_omni import transforms as qwen2_5_omni_transforms
from stagemesh.services.models.qwen3_omni import transforms as qwen3_omni_transforms
from stagemesh.services.models.qwen3_tts.description import read_config
from stagemesh.services.models.qwen3_tts.prompt import RowWriter, SpokenPrompt, make_prompt_writer
from tests.engines.support import collect, flow, packets, usage_of
from tests.engines.vllm.engines import data_plane, started
from tests.models.checkpoints import Change, change_weights, changed, renamed
from tests.models.qwen2_5_omni import reference as qwen2_5_omni_reference
from tests.models.qwen3_omni.reference import Conversation, Reference, Result
from tests.models.qwen3_tts.prompts import requests, talker_rows, write_prompt
from tests.rpc.call_errors import raises

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

TOKENS = 24
TEXTS = ["Hello there", "What is the sea?", "one two three four five six seven eight nine ten", "a"]
CONVERSATIONS = [Conversation([{"role": "user", "content": text}]) for text in TEXTS]


class Speech(NamedTuple):
    """An answer to speak, and the codes of the reference, which lack the frame of the end or of the last token."""

    rows: Callable[[int], Iterator[Packet]]
    """Yields the talker's rows, of which a number arrive at a time."""
    codes: list[list[int]]


class Talker(NamedTuple):
    """The engine of a talker, the data plane that it emits codes into, and answers to speak."""

    engine: VllmEngine
    plane: DataPlane
    speeches: Sequence[Speech]
    speaker: str

    @property
    def longest(self) -> Speech:
        return max(self.speeches, key=lambda speech: len(speech.codes))

    def task(self, speech: Speech, *, cut: int = 1, temperature: float = 0.0, speaker: str = "") -> Task:
        sampling = SamplingOptions(max_tokens=TOKENS, min_tokens=TOKENS if temperature else 0, temperature=temperature)
        options = {"speaker": speaker or self.speaker} if self.speaker else {}
        inlets = {"e": flow(speech.rows(cut))}
        return Task("r", 7, inlets=inlets, sampling=sampling, options=options, wanted=frozenset({"codes"}))

    async def codes(self, speech: Speech, **changes: Any) -> list[list[int]]:
        return await codes_of(self.engine, self.task(speech, **changes))


@asynccontextmanager
async def talking(model: Path, name: str, speeches: Sequence[Speech], speaker: str = "") -> AsyncGenerator[Talker]:
    async with data_plane() as plane, started(model, plane.arena, **options_of(name)) as engine:
        yield Talker(engine, plane, speeches, speaker)


def options_of(name: str) -> dict[str, JsonValue]:
    """Returns the options of a stage that runs the codec language model with this name."""
    return {
        "dtype": "float32",
        "kv_cache_memory_bytes": 1 << 20,
        "max_model_len": 512,
        "max_num_batched_tokens": 16,
        "enable_chunked_prefill": True,
        "checkpoint_tokens": 8,
        "codec": {"model": name, "dtype": "float32"},
    }


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def qwen3_omni(tiny_qwen3_omni: Path) -> AsyncIterator[Talker]:
    """A talker with several codes for each frame."""
    reference = Reference(tiny_qwen3_omni)
    answers = [reference.generate(each, text_tokens=12, codec_tokens=TOKENS) for each in CONVERSATIONS]
    speeches = [Speech(partial(_qwen3_omni_rows, tiny_qwen3_omni, each), each.codes.tolist()) for each in answers]
    async with talking(tiny_qwen3_omni, "qwen3_omni.talker", speeches, "Ethan") as talker:
        yield talker


def _qwen3_omni_rows(model: Path, answer: Result, cut: int) -> Iterator[Packet]:
    """Yields the rows for an answer of the thinker that arrives `cut` tokens at a time."""
    transform = qwen3_omni_transforms.Thinker2Talker(model)
    text = answer.text_ids.astype(np.int32)
    yield from transform.push(Packet({"prompt_ids": answer.prompt_ids.astype(np.int32)}))
    for start in range(0, len(text), cut):
        yield from transform.push(Packet({"token_ids": text[start : start + cut]}))
    yield from transform.finish()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def qwen2_5_omni(tiny_qwen2_5_omni: Path) -> AsyncIterator[Talker]:
    """A talker with one code for each frame, whose rows contain states of the thinker."""
    reference, speeches = qwen2_5_omni_reference.Reference(tiny_qwen2_5_omni), list[Speech]()
    for conversation in CONVERSATIONS[:3]:
        answer = reference.generate(conversation, text_tokens=12, codec_tokens=TOKENS)
        assert len(set(answer.codes[:, 0].tolist())) >= 8
        states = _states(reference.model.thinker, answer)
        for early in (False, True):
            rows = partial(_qwen2_5_omni_rows, tiny_qwen2_5_omni, answer, states, early)
            speeches.append(Speech(rows, answer.codes.tolist()))
    async with talking(tiny_qwen2_5_omni, "qwen2_5_omni.talker", speeches, "Ethan") as talker:
        yield talker


def _states(thinker: Any, answer: Result) -> Array:
    """Returns the thinker's states of all tokens except the last one, [tokens, width]."""
    ids = np.concatenate([answer.prompt_ids, answer.text_ids])[None, :-1]
    with torch.inference_mode():
        made = thinker(torch.from_numpy(ids), attention_mask=torch.ones(ids.shape), output_hidden_states=True)
    return np.asarray(made.hidden_states[-1][0], np.float32)


def _qwen2_5_omni_rows(model: Path, answer: Result, states: Array, early: bool, cut: int) -> Iterator[Packet]:
    """Yields the rows for `cut` states at a time. If `early`, all tokens arrive before the first states."""
    transform = qwen2_5_omni_transforms.Thinker2Talker(model)
    prompt, text = (ids.astype(np.int32) for ids in (answer.prompt_ids, answer.text_ids))
    yield from transform.push(Packet({"prompt_ids": prompt}))
    if early:
        yield from transform.push(Packet({"token_ids": text}))
    for start in range(0, len(states), cut):
        places = np.arange(start, min(start + cut, len(states)), dtype=np.int32)
        tensors: dict[str, Array] = {"hidden_states": states[places], "positions": np.repeat(places[:, None], 3, 1)}
        if not early:
            tensors["token_ids"] = text[places[places >= len(prompt) - 1] - (len(prompt) - 1)]
        yield from transform.push(Packet(tensors, {"token_start": start}))
    yield from transform.finish()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def qwen3_tts(tiny_qwen3_tts: Path) -> AsyncIterator[Talker]:
    """A talker whose rows may contain given frames."""
    writer = make_prompt_writer(tiny_qwen3_tts, {})
    by_name = [request for request in requests() if "speaker" in request.options]
    speeches = [Speech(partial(_divided, talker_rows(write_prompt(writer, each))), each.codes) for each in by_name]
    async with talking(tiny_qwen3_tts, "qwen3_tts.talker", speeches) as talker:
        yield talker


def _divided(whole: Sequence[Packet], cut: int) -> Iterator[Packet]:
    """Yields packets of at most `cut` rows."""
    for packet in whole:
        first = packet.metadata["token_start"]
        assert isinstance(first, int)
        for start in range(0, len(packet.tensors["text_ids"]), cut):
            part = {name: tensor[start : start + cut] for name, tensor in packet.tensors.items()}
            yield Packet(part, {**packet.metadata, "token_start": first + start})


@pytest.fixture(params=["qwen3_omni", "qwen2_5_omni", "qwen3_tts"])
def talker(request: pytest.FixtureRequest) -> Talker:
    talker: Talker = request.getfixturevalue(request.param)
    return talker


async def codes_of(engine: VllmEngine, task: Task, *, preempt_after: frozenset[int] = frozenset()) -> list[list[int]]:
    """Returns the frames of a task. All requests are preempted after each of these numbers of emissions."""
    emitted = list[Packet]()
    async with aclosing(engine.submit(task)) as events:
        async for event in events:
            if isinstance(event, Emission) and "codes" in event.packet.tensors:
                emitted.append(event.packet)
                if len(emitted) in preempt_after:
                    await engine.control.clear_caches(preempt=True)
    return frames_in(emitted)


def frames_in(emitted: Sequence[Packet]) -> list[list[int]]:
    return [frame for packet in emitted for frame in packet.tensors.get("codes", np.empty((0, 1))).tolist()]


def check(codes: list[list[int]], speech: Speech) -> None:
    """Asserts that codes equal the reference's codes, and end with the frame that these lack."""
    length = len(speech.codes)
    assert codes[:length] == speech.codes
    assert len(codes) - length == (length < TOKENS)


# -- all talkers


@pytest.mark.parametrize("cut", [1, 3, 1000])
async def test_codes_equal_the_reference(talker: Talker, cut: int) -> None:
    for speech in talker.speeches:
        check(await talker.codes(speech, cut=cut), speech)


async def test_requests_at_once_equal_the_reference(talker: Talker) -> None:
    speeches = [*talker.speeches, *talker.speeches]
    made = await asyncio.gather(*(talker.codes(speech) for speech in speeches))
    for codes, speech in zip(made, speeches, strict=True):
        check(codes, speech)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_a_preempted_request_computes_the_same_codes_again(talker: Talker, temperature: float) -> None:
    task = partial(talker.task, talker.longest, temperature=temperature)
    undisturbed = await codes_of(talker.engine, task())
    assert await codes_of(talker.engine, task(), preempt_after=frozenset({1, 9})) == undisturbed


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_a_resumed_request_continues_with_the_same_codes(talker: Talker, temperature: float) -> None:
    task = partial(talker.task, talker.longest, temperature=temperature)
    whole, before = await codes_of(talker.engine, task()), 0
    async with aclosing(talker.engine.submit(task())) as events:
        async for event in events:
            if isinstance(event, Checkpoint):
                break
            before += len(frames_in(packets([event])))
    assert isinstance(event, Checkpoint)
    assert 0 < before <= event.steps
    resumed = replace(task(), resume_from=replace(event, rows={"codes": before}))
    assert await codes_of(talker.engine, resumed) == whole[before:]


@pytest.mark.parametrize("frames", [7, 8, 9])
async def test_a_checkpoint_has_no_frames_after_its_tokens(frames: int) -> None:
    emitted = EmittedFrames(EngineRequest(Task("r", 7), "r/0", RequestPrompt([5, 6]), CheckedParams()))
    codes = np.arange(2 * frames, dtype=np.int32).reshape(frames, 2)
    emitted.push(1, {"codes": codes})
    count, state = emitted.state(8)
    assert count == min(frames, 8)
    assert state["residuals"].tolist() == codes[:count, 1:].tolist()


@pytest.mark.parametrize("talker", ["qwen3_omni", "qwen2_5_omni"], indirect=True)
async def test_the_speaker_changes_the_codes(talker: Talker) -> None:
    chelsie, ethan = [
        [await talker.codes(speech, speaker=name) for speech in talker.speeches] for name in ("chelsie", "Ethan")
    ]
    assert chelsie != ethan
    with pytest.raises(InvalidRequestError, match=r"no speaker 'Nobody'; choose one of: (aiden, )?chelsie, ethan"):
        await talker.codes(talker.longest, speaker="Nobody")


OMNI_ROWS: Mapping[str, Array] = {
    "text_ids": np.zeros(1, np.int32),
    "codec_slots": np.full(1, -1, np.int8),
    "positions": np.zeros((1, 3), np.int32),
}


def given(*codes: int) -> Mapping[str, Array]:
    return {"text_ids": np.zeros(1, np.int32), "row_codes": np.array([codes], np.int32)}


@pytest.mark.parametrize(
    ("talker", "rows", "message"),
    [
        ("qwen3_omni", {"text_ids": np.array([100_000], np.int32)}, "text_ids contains values outside -1 to"),
        ("qwen3_omni", {"codec_slots": np.array([9], np.int8)}, "codec_slots contains values outside -1 to 5"),
        ("qwen3_omni", {"positions": np.zeros((1, 2), np.int32)}, "positions"),
        ("qwen3_omni", {"states": np.zeros((1, 3), np.float32)}, "states"),
        ("qwen3_tts", given(64 + 1024, -1, -1, -1), "group 0 of row_codes contains values outside -1 to 1087"),
        ("qwen3_tts", given(0, 0, 64, 0), "group 2 of row_codes contains values outside -1 to 63"),
        ("qwen3_tts", given(0, 0), "row_codes has 2 codes in each row; the model has 4"),
    ],
    indirect=["talker"],
)
async def test_invalid_rows_are_rejected(talker: Talker, rows: Mapping[str, Array], message: str) -> None:
    tensors = {**rows} if "row_codes" in rows else {**OMNI_ROWS, **rows}
    speech = Speech(lambda _cut: iter([Packet(tensors, {"token_start": 0})]), [])
    with pytest.raises(InvalidChunkError, match=message):
        await talker.codes(speech)


# -- sampling, aborting and ending


async def test_random_codes_depend_on_the_seed_alone(qwen3_omni: Talker) -> None:
    first, *others = (partial(qwen3_omni.task, speech, temperature=0.9) for speech in qwen3_omni.speeches)
    alone = await codes_of(qwen3_omni.engine, first())
    together, *_ = await asyncio.gather(*(codes_of(qwen3_omni.engine, task()) for task in (first, *others)))
    assert together == alone != await codes_of(qwen3_omni.engine, replace(first(), seed=8))
    assert alone[:-1] != qwen3_omni.speeches[0].codes


async def endless(rows: AsyncIterable[Packet]) -> AsyncIterator[Packet]:
    """Yields the packets of a flow, then waits until it is closed."""
    async for packet in rows:
        yield packet
    await asyncio.Event().wait()


@pytest.mark.usefixtures("no_collector")
async def test_an_aborted_request_and_its_unread_frames_are_freed_at_once(qwen3_omni: Talker) -> None:
    whole = qwen3_omni.task(qwen3_omni.speeches[2], temperature=0.9)
    work = replace(whole, inlets={"e": endless(whole.inlets["e"])})
    known, arena = weakref.ref(work), qwen3_omni.plane.arena
    async with aclosing(qwen3_omni.engine.submit(work)) as events:
        while not isinstance(await anext(events), Emission):
            pass
        # The engine computes further frames meanwhile.
        await until(lambda: arena.used_bytes >= 4 * PAGE_BYTES, timeout_s=10)
    del work
    await until(lambda: not arena.used_bytes, timeout_s=5)
    assert known() is None


async def test_the_end_code_ends_the_request(qwen3_omni: Talker) -> None:
    finishes = dict[bool, str]()
    for speech in qwen3_omni.speeches:
        usage = usage_of(await collect(qwen3_omni.engine.submit(qwen3_omni.task(speech))))
        finishes[len(speech.codes) < TOKENS - 1] = usage.finish.reason
    assert finishes == {True: "end", False: "length"}


async def test_the_first_two_frames_end_no_speech(qwen3_tts: Talker) -> None:
    speech = qwen3_tts.speeches[0]
    work, first = qwen3_tts.task(speech), speech.codes[0][0]
    ending = replace(work, sampling=replace(work.sampling, stop_token_ids=(first,)))
    codes = await codes_of(qwen3_tts.engine, ending)
    assert len(codes) >= 2
    assert first not in {codes[0][0], codes[1][0]}


# -- a cloned voice, with an x-vector and frames of codes


@pytest.fixture(scope="module")
def clone(tiny_qwen3_tts: Path) -> Sequence[Packet]:
    noise = np.random.default_rng(0)
    frames, vector = noise.integers(0, 64, (20, 4), np.int32), noise.normal(0, 1, 64).astype(np.float32)
    return RowWriter(read_config(tiny_qwen3_tts)).write(SpokenPrompt([5, 6, 7], range(30), frames, speaker=vector))


async def test_given_frames_do_not_depend_on_how_rows_arrive(qwen3_tts: Talker, clone: Sequence[Packet]) -> None:
    cloned = Speech(partial(_divided, clone), [])
    whole = await qwen3_tts.codes(cloned, cut=1000)
    assert await qwen3_tts.codes(cloned, cut=1) == whole
    silent = Packet({**clone[0].tensors, "states": 0 * clone[0].tensors["states"]}, clone[0].metadata)
    assert await qwen3_tts.codes(Speech(partial(_divided, [silent, *clone[1:]]), [])) != whole


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_a_preempted_clone_is_the_same(qwen3_tts: Talker, clone: Sequence[Packet], temperature: float) -> None:
    task = partial(qwen3_tts.task, Speech(partial(_divided, clone), []), cut=1000, temperature=temperature)
    undisturbed = await codes_of(qwen3_tts.engine, task())
    assert await codes_of(qwen3_tts.engine, task(), preempt_after=frozenset({1, 9})) == undisturbed


# -- checkpoints that cannot be loaded


def without(section: str) -> Change:
    def change(model: Path) -> None:
        config = json.loads((model / "config.json").read_text())
        del config[section]
        (model / "config.json").write_text(json.dumps(config))

    return change


_NORM = "talker.model.norm.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("talker_config"), "has no talker_config"),
        (without("thinker_config"), "has no thinker_config"),
        (shutil.rmtree, "model does not exist"),
        renamed("talker.model.layers.1.mlp.experts.3.up_proj.weight", "talker.model.layers.7.x"),
        # vLLM itself would compute with arbitrary embeddings of text.
        (
            change_weights(lambda weights: weights.pop("thinker.model.embed_tokens.weight")),
            r"lacks parts of weights, .*: text_embedding\.weight",
        ),
        (
            change_weights(lambda weights: weights.update({_NORM: weights[_NORM][:30]})),
            r"vLLM cannot load .*Error: .*30",
        ),
    ],
    ids=["no talker", "no thinker", "no folder", "unknown weight", "missing part", "other shape"],
)
async def test_unloadable_models_are_named(tiny_qwen3_omni: Path, tmp_path: Path, change: Change, message: str) -> None:
    with raises(NotReadyError, reason="LOAD_FAILED", match=message):
        async with started(changed(tiny_qwen3_omni, tmp_path, change), **options_of("qwen3_omni.talker")):
            pass
