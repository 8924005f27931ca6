"""Sampling through the vllm engine on a tiny model, with prefills split at 64 tokens, compared with vLLM itself."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import JsonValue
from tokenizers import Tokenizer
from vllm import CompletionOutput, SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.services.engines.base import (
    Checkpoint,
    Emission,
    EngineEvent,
    Finish,
    SamplingOptions,
    Structure,
    Task,
    TokenLogprobs,
    Usage,
)
from stagemesh.services.engines.prompts import Prompt
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.engines.vllm.engine_core import shut_down
from tests.engines.support import (
    as_prompt,
    collect,
    packets,
    sampled_tokens,
    text_logprobs_of,
    text_of,
    tokens_of,
    usage_of,
)
from tests.engines.vllm.engines import started, undisturbed
from tests.engines.vllm.tiny_model import MAX_MODEL_LEN, write_real_model
from tests.rpc.call_errors import raises

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

VOCABULARY = 260
CHUNK_TOKENS = 64
KV_BYTES = 8 << 20
LONG = [10 + number % 200 for number in range(200)]
FIELDS = {"age": {"type": "integer", "minimum": 0, "maximum": 99}, "side": {"enum": ["left", "right"]}}
SCHEMA = json.dumps({"type": "object", "properties": FIELDS, "required": [*FIELDS], "additionalProperties": False})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_real_model(tmp_path_factory.mktemp("tiny"))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|beyond|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[VllmEngine]:
    options: dict[str, JsonValue] = {"kv_cache_memory_bytes": KV_BYTES, "max_num_batched_tokens": CHUNK_TOKENS}
    async with started(model, **options) as engine:
        yield engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def direct(model: Path) -> AsyncIterator[AsyncLLM]:
    """Plain vLLM, which must not split a seeded prefill on a CPU."""
    arguments = AsyncEngineArgs(
        model=str(model),
        enforce_eager=True,
        enable_chunked_prefill=False,
        disable_log_stats=True,
        kv_cache_memory_bytes=KV_BYTES,
        distributed_executor_backend="vllm.v1.executor.uniproc_executor.UniProcExecutor",
    )
    llm = AsyncLLM.from_engine_args(arguments)
    yield llm
    shut_down(llm)


def task(prompt: Prompt | Sequence[int] = "hello", *, seed: int = 3, request_id: str = "r", **sampling: Any) -> Task:
    options = SamplingOptions(**{"max_tokens": 24, "temperature": 1.0, **sampling})
    return Task(request_id, seed, as_prompt(prompt), sampling=options)


def logprobs_of(events: Sequence[EngineEvent]) -> list[TokenLogprobs]:
    return [each for event in events for each in getattr(event, "logprobs", ())]


async def direct_output(llm: AsyncLLM, ids: Sequence[int], **sampling: Any) -> CompletionOutput:
    params = SamplingParams(**{"max_tokens": 24, "temperature": 1.0} | sampling)
    params.output_kind = RequestOutputKind.FINAL_ONLY
    (prompt,) = llm.renderer.render_cmpl([{"prompt_token_ids": list(ids)}])
    (output,) = [output async for output in llm.generate(prompt, params, f"direct-{params.seed}")]
    return output.outputs[0]


async def direct_tokens(llm: AsyncLLM, ids: Sequence[int], **sampling: Any) -> list[int]:
    return list((await direct_output(llm, ids, **sampling)).token_ids)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def plain_tokens(direct: AsyncLLM) -> list[list[int]]:
    """The tokens of four seeds without other options."""
    return [await direct_tokens(direct, LONG[seed:], seed=seed) for seed in range(4)]


SAMPLINGS: Sequence[Mapping[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.5},
    {"repetition_penalty": 0.5},
    {"presence_penalty": 1.5, "frequency_penalty": -1.0},
    {"min_tokens": 20, "ignore_eos": True},
    {"min_tokens": 6, "stop_token_ids": [*range(VOCABULARY - 10)]},
    {"top_k": 0, "stop_token_ids": [*range(10, 20)]},
    {"max_tokens": 5},
    {"bad_words": [*"abcdefgh"]},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=lambda sampling: ",".join(sampling) or "plain")
async def test_seeded_tokens_equal_vllms_own(
    engine: VllmEngine, direct: AsyncLLM, plain_tokens: list[list[int]], sampling: Mapping[str, Any]
) -> None:
    tasks = [task(LONG[seed:], seed=seed, request_id=str(seed), **sampling) for seed in range(4)]
    ours = await asyncio.gather(*(sampled_tokens(engine, each) for each in tasks))
    theirs = [await direct_tokens(direct, LONG[seed:], seed=seed, **sampling) for seed in range(4)]
    assert ours == theirs
    # No text of these seeds ends early. Its end would not be noticed.
    noticed = sampling.keys() - {"min_tokens", "ignore_eos"}
    assert not noticed or ours != plain_tokens


async def test_split_prefill_samples_like_a_whole_one(engine: VllmEngine) -> None:
    alone = [await sampled_tokens(engine, task(LONG, seed=seed)) for seed in range(3)]
    tasks = [task(LONG, seed=number % 3, request_id=str(number)) for number in range(9)]
    assert await asyncio.gather(*(sampled_tokens(engine, each) for each in tasks)) == alone * 3


async def test_a_stop_text_ends_the_output_before_it(engine: VllmEngine) -> None:
    plain = text_of(await collect(engine.submit(task(structure=Structure("regex", ("[a-z]{20}",))))))
    stopped = task(structure=Structure("regex", ("[a-z]{20}",)), stop=(plain[6:8],))
    assert text_of(await collect(engine.submit(stopped))) == plain[: plain.index(plain[6:8])]


async def test_min_tokens_beyond_the_default_length_are_kept(engine: VllmEngine) -> None:
    assert len(await sampled_tokens(engine, task([10], max_tokens=None, min_tokens=254))) >= 254


async def test_ignore_eos_continues_to_max_tokens(engine: VllmEngine) -> None:
    tasks = [task([10], seed=seed, max_tokens=200, request_id=str(seed)) for seed in range(8)]
    lengths = [len(await sampled_tokens(engine, each)) for each in tasks]
    shortest = tasks[lengths.index(min(lengths))]
    assert min(lengths) < 200
    endless = replace(shortest, sampling=replace(shortest.sampling, ignore_eos=True))
    assert len(await sampled_tokens(engine, endless)) == 200


async def test_each_token_has_logprobs_sorted_by_rank(engine: VllmEngine) -> None:
    events = await collect(engine.submit(task(logprobs=3)))
    logprobs = logprobs_of(events)
    assert [each.sampled.id for each in logprobs] == tokens_of(events)
    assert len(logprobs) > 5
    for each in logprobs:
        assert len(each.top) == 3
        assert list(each.top) == sorted(each.top, key=lambda token: -token.logprob)
        assert each.sampled.logprob <= each.top[0].logprob <= 0
        assert each.sampled in each.top or each.sampled.id not in {token.id for token in each.top}


async def test_logprobs_equal_vllms_own(engine: VllmEngine, direct: AsyncLLM) -> None:
    ours = logprobs_of(await collect(engine.submit(task(LONG, logprobs=2))))
    made = await direct_output(direct, LONG, seed=3, logprobs=2)
    assert made.logprobs
    theirs = [made.logprobs[at][token] for at, token in enumerate(made.token_ids)]
    assert [each.sampled.logprob for each in ours] == pytest.approx([each.logprob for each in theirs], abs=1e-4)
    assert [each.sampled.text for each in ours] == [each.decoded_token for each in theirs]
    assert all({token.id for token in each.top} <= made.logprobs[at].keys() for at, each in enumerate(ours))


async def test_greedy_tokens_are_the_most_probable(engine: VllmEngine) -> None:
    events = await collect(engine.submit(task(temperature=0.0, logprobs=1)))
    assert tokens_of(events) == [each.top[0].id for each in logprobs_of(events)]


async def test_logprobs_of_a_prompt_equal_vllms_own(engine: VllmEngine, direct: AsyncLLM) -> None:
    params = SamplingParams(max_tokens=1, prompt_logprobs=2, output_kind=RequestOutputKind.FINAL_ONLY)
    (prompt,) = direct.renderer.render_cmpl([{"prompt_token_ids": LONG}])
    (made,) = [output async for output in direct.generate(prompt, params, "direct")]
    assert made.prompt_logprobs is not None
    # The second request finds its prompt in the prefix cache.
    for _ in range(2):
        ours = usage_of(await collect(engine.submit(task(LONG, prompt_logprobs=2, max_tokens=1)))).prompt_logprobs
        assert [each.sampled.id for each in ours] == LONG
        assert (ours[0].sampled.logprob, ours[0].top) == (0.0, ())
        text = "".join(each.sampled.text for each in ours[:-1])
        assert ours[-1].position == len(text.encode())
        for each, known in zip(ours[1:], made.prompt_logprobs[1:], strict=True):
            assert known is not None
            assert each.sampled.logprob == pytest.approx(known[each.sampled.id].logprob, abs=1e-4)
            assert len(each.top) == 2
            assert {token.id for token in each.top} <= known.keys()
    assert usage_of(await collect(engine.submit(task(LONG, max_tokens=1)))).prompt_logprobs == ()


@pytest.mark.parametrize("alternatives", [700, 21])
async def test_too_many_logprobs_of_a_prompt_are_rejected(engine: VllmEngine, alternatives: int) -> None:
    with pytest.raises(InvalidRequestError, match=r"prompt.logprobs"):
        await collect(engine.submit(task(LONG, max_tokens=1, prompt_logprobs=alternatives)))


async def test_tokens_are_counted(engine: VllmEngine) -> None:
    events = await collect(engine.submit(task(LONG, count_tokens=True)))
    counts = [each.counts for each in events if isinstance(each, Emission)]
    assert counts == [(len(LONG), made + 1) for made in range(len(counts))]


async def test_the_tokens_of_a_prompt_need_no_model(engine: VllmEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.control.llm, "add_request", None)
    tokenizer = engine.control.llm.get_tokenizer()
    for prompt in ([*LONG, *LONG], tokenizer.encode("né 🙂", add_special_tokens=False)):
        (usage,) = await collect(engine.submit(task(prompt, tokens_only=True)))
        assert isinstance(usage, Usage)
        assert (usage.output_tokens, usage.context_tokens) == (0, MAX_MODEL_LEN)
        tokens = [each.sampled for each in usage.prompt_logprobs]
        assert [token.id for token in tokens] == prompt
        assert "".join(token.text for token in tokens) == tokenizer.decode(prompt)


async def test_zero_alternatives_still_give_logprobs(engine: VllmEngine) -> None:
    assert {each.top for each in logprobs_of(await collect(engine.submit(task(logprobs=0))))} == {()}
    assert logprobs_of(await collect(engine.submit(task()))) == []


async def test_tokens_are_emitted_only_if_wanted(engine: VllmEngine) -> None:
    events = await collect(engine.submit(replace(task(logprobs=2), wanted=frozenset({"text"}))))
    assert {name for packet in packets(events) for name in packet.tensors} == {"text"}
    assert logprobs_of(events) == []


# The text of 3 characters, of 1, 2 and 4 bytes. The tiny model's tokens are bytes.
CHARACTERS = Structure("allowed_texts", ("aé\U0001f600",))


async def test_text_has_the_logprobs_of_its_tokens(engine: VllmEngine) -> None:
    asked = replace(task(structure=CHARACTERS, logprobs=1), wanted=frozenset({"text"}))
    events = await collect(engine.submit(asked))
    assert text_of(events) == "aé\U0001f600"
    made = text_logprobs_of(events)
    assert [each.position for each in made] == [0, 1, 1, 3, 3, 3, 3]
    assert [each.sampled.text for each in made] == ["a", "", "é", "", "", "", "\U0001f600"]
    assert all(each.sampled == each.top[0] for each in made)


async def test_each_piece_of_text_has_the_tokens_that_begin_in_it(engine: VllmEngine) -> None:
    events = await collect(engine.submit(task(LONG, logprobs=0, stop=("never generated",), max_tokens=50)))
    end = 0
    for event in (each for each in events if isinstance(each, Emission)):
        begin, end = end, end + len(event.packet.tensors["text"])
        assert all(begin <= each.position < end for each in event.text_logprobs)
    plain = await collect(engine.submit(task(LONG, logprobs=0, max_tokens=50)))
    assert text_logprobs_of(events) == text_logprobs_of(plain)
    assert end == len(text_of(events).encode())
    after_the_text = [each for each in logprobs_of(events) if each.position >= end]
    assert text_logprobs_of(events) + after_the_text == logprobs_of(events)


async def test_tokens_of_a_stop_text_have_no_place_in_the_text(engine: VllmEngine) -> None:
    asked = task(structure=Structure("allowed_texts", ("abcdef",)), stop=("cd",), logprobs=0)
    events = await collect(engine.submit(asked))
    assert text_of(events) == "ab"
    assert [each.sampled.text for each in text_logprobs_of(events)] == ["a", "b"]
    assert [each.sampled.text for each in logprobs_of(events)] == ["a", "b", "c", "d"]


async def test_tokens_spell_the_text(engine: VllmEngine, direct: AsyncLLM) -> None:
    events = await collect(engine.submit(task(structure=Structure("regex", ("[a-z]{12}",)))))
    assert direct.get_tokenizer().decode(tokens_of(events), skip_special_tokens=True) == text_of(events)


@pytest.mark.parametrize("seed", range(4))
async def test_json_conforms_to_its_schema(engine: VllmEngine, seed: int) -> None:
    asked = task(seed=seed, max_tokens=200, structure=Structure("json_schema", (SCHEMA,)))
    made = json.loads(text_of(await collect(engine.submit(asked))))
    assert made.keys() == {"age", "side"}
    assert 0 <= made["age"] <= 99
    assert made["side"] in {"left", "right"}


@pytest.mark.parametrize(
    ("structure", "expected"),
    [
        (Structure("regex", ("[0-9]{3}-[a-f]{4}",)), "[0-9]{3}-[a-f]{4}"),
        (Structure("allowed_texts", ("yes", "no")), "yes|no"),
        (Structure("grammar", ('root ::= "a" | "b" root',)), "b*a"),
        (Structure("grammar", ('start: "a" | "b" start',)), "b*a"),
    ],
)
async def test_text_has_the_requested_structure(engine: VllmEngine, structure: Structure, expected: str) -> None:
    texts = [text_of(await collect(engine.submit(task(LONG, seed=seed, structure=structure)))) for seed in range(4)]
    assert all(re.fullmatch(expected, text) for text in texts), texts


WRONG: Sequence[tuple[Mapping[str, Any], str]] = [
    ({"structure": Structure("json_schema", ("{not json",))}, "key must be a string"),
    ({"structure": Structure("json_schema", ("[1]",))}, "Expecting object"),
    ({"structure": Structure("json_schema", ('{"type": "number one"}',))}, "Invalid type: number one"),
    ({"structure": Structure("json_schema", ('{"$ref": "#/nowhere"}',))}, "nowhere"),
    ({"structure": Structure("regex", ("[0-9",))}, "unclosed character class"),
    ({"structure": Structure("regex", ("(?<=a)b",))}, "look-around"),
    ({"structure": Structure("grammar", ("start: (((",))}, "Expected token"),
    ({"structure": Structure("allowed_texts", ("ab",)), "bad_words": ("a",)}, "no token fulfils allowed_texts"),
    ({"logprobs": 21}, "greater than max allowed: 20"),
    ({"top_k": -3}, "top_k"),
    ({"min_p": 2.0}, "min_p"),
    ({"presence_penalty": 3.0}, "presence_penalty"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
]
BEYOND: Sequence[tuple[Mapping[str, Any], str, str]] = [
    ({"stop_token_ids": (5, 10**6)}, "UNKNOWN_TOKEN", "stop_token_ids: token id 1000000 is outside the model's"),
    ({"bad_words": ("<|beyond|>",)}, "UNKNOWN_TOKEN", "bad_words: token id 260 is outside"),
    ({"min_tokens": MAX_MODEL_LEN, "max_tokens": None}, "PROMPT_TOO_LONG", "maximum context length is 256 tokens"),
]


@pytest.mark.parametrize(
    ("sampling", "reason", "message"),
    [*((sampling, "INVALID_SAMPLING", message) for sampling, message in WRONG), *BEYOND],
    ids=lambda value: str(value)[:40],
)
async def test_invalid_sampling_fails_its_request_alone(
    engine: VllmEngine, sampling: Mapping[str, Any], reason: str, message: str
) -> None:
    async with undisturbed(engine, task(LONG, max_tokens=30, ignore_eos=True, request_id="other")):
        with raises(InvalidRequestError, reason=reason, match=re.escape(message)):
            await sampled_tokens(engine, task(**sampling))


async def test_text_with_a_token_beyond_the_vocabulary_is_rejected(engine: VllmEngine) -> None:
    with pytest.raises(InvalidRequestError, match="token id 260 is outside the model's vocabulary of 260") as caught:
        await collect(engine.submit(task("hello <|beyond|>")))
    assert caught.value.reason == "UNKNOWN_TOKEN"


async def test_structure_cannot_resume_from_a_checkpoint(engine: VllmEngine) -> None:
    asked = replace(task(structure=Structure("regex", ("a+",))), resume_from=Checkpoint(1, (70,)))
    with pytest.raises(UnsupportedError, match="cannot resume from a checkpoint"):
        await collect(engine.submit(asked))


async def test_usage_counts_the_sampled_and_the_cached_tokens(engine: VllmEngine) -> None:
    runs = [await collect(engine.submit(task(LONG, ignore_eos=True))) for _ in range(2)]
    first, second = (usage_of(events) for events in runs)
    assert (first.prompt_tokens, first.output_tokens, first.engine_steps) == (len(LONG), 24, 24)
    assert 0 < second.cached_tokens < len(LONG)


async def test_usage_says_why_the_output_ends(engine: VllmEngine) -> None:
    plain = await sampled_tokens(engine, task())
    choice = Structure("allowed_texts", ("abcdef",))
    for asked, finish in (
        (task(ignore_eos=True), Finish("length")),
        (task(stop_token_ids=(plain[5],)), Finish("stop", stop_token_id=plain[5])),
        (task(structure=choice, stop=("zz", "cd")), Finish("stop", stop_text="cd")),
        (task(structure=choice), Finish("end")),
        (task(LONG, ignore_eos=True, max_tokens=None), Finish("limit")),
        (task(LONG, ignore_eos=True, max_tokens=MAX_MODEL_LEN), Finish("limit")),
    ):
        assert usage_of(await collect(engine.submit(asked))).finish == finish
