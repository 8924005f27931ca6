"""The vllm engine's controls on a tiny model: adapters, sleep, profiles and caches."""

import asyncio
import gzip
import itertools
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from pydantic import JsonValue

from stagemesh.common.errors import InvalidRequestError, NotFoundError, NotReadyError, OverloadedError, UnsupportedError
from stagemesh.services.engines.base import SamplingOptions, Task
from stagemesh.services.engines.prompts import RawPrompt
from stagemesh.services.engines.vllm.engine import VllmEngine
from tests.engines.support import collect, controls_of, packets, sampled_tokens, stage_config, tokens_of
from tests.engines.vllm.emitted_states import greedy, load_reference
from tests.engines.vllm.engines import started
from tests.engines.vllm.tiny_adapter import merge, set_config, write_adapter
from tests.engines.vllm.tiny_model import write_real_model
from tests.module_fixtures import made_for_module
from tests.rpc.call_errors import raises

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

BLOCK, BLOCKS = 32, 65
OPTIONS: Mapping[str, JsonValue] = {
    "dtype": "float32",
    "block_size": BLOCK,
    "num_gpu_blocks_override": BLOCKS,
    "enable_lora": True,
    "max_loras": 2,
    "max_cpu_loras": 3,
    "max_lora_rank": 8,
}
STEPS = 10
PROMPTS = [[20 + (11 * number + at) % 200 for at in range(3 + 2 * number)] for number in range(8)]
LONG = [20 + at % 200 for at in range(38 * BLOCK)]
"""Its request takes more than half of the cache, so that two of them do not fit."""
SECONDS = 700
"""The number of tokens after it, which take the core, a separate process, at least a second."""


model = made_for_module(lambda folder: write_real_model(folder, positions=BLOCK * (BLOCKS - 1)))


profile_dir = made_for_module(Path)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(model: Path, profile_dir: Path) -> AsyncIterator[VllmEngine]:
    async with started(model, **OPTIONS, profile_dir=str(profile_dir)) as engine:
        yield engine


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: VllmEngine) -> AsyncIterator[VllmEngine]:
    yield shared
    for adapter in controls_of(shared).adapters.list_adapters():
        await controls_of(shared).adapters.unload(adapter.name, drain=False)
    await controls_of(shared).caches.clear_caches(preempt=False)


def task(prompt: Sequence[int] = PROMPTS[0], *, adapter: str | None = None, max_tokens: int = STEPS) -> Task:
    sampling = SamplingOptions(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    return Task("r", 1, RawPrompt(prompt), sampling=sampling, adapter=adapter)


def files_in(folder: Path) -> list[str]:
    return sorted(map(str, folder.iterdir()))


# -- adapters


async def test_an_adapter_for_half_a_batch_equals_merging(engine: VllmEngine, model: Path, tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "poet")
    await controls_of(engine).adapters.load("poet", str(adapter))
    tasks = [task(prompt, adapter="poet" if number % 2 else None) for number, prompt in enumerate(PROMPTS)]
    made = await asyncio.gather(*(sampled_tokens(engine, each) for each in tasks))
    plain, merged = load_reference(model), merge(load_reference(model), adapter)
    expected = [greedy(merged if number % 2 else plain, prompt, steps=STEPS) for number, prompt in enumerate(PROMPTS)]
    assert made == expected
    assert expected[1] != greedy(plain, PROMPTS[1], steps=STEPS)


async def test_adapter_replaces_the_one_of_its_name(engine: VllmEngine, model: Path, tmp_path: Path) -> None:
    prompt = LONG[: 3 * BLOCK]
    made: list[list[int]] = []
    for seed in (1, 2):
        await controls_of(engine).adapters.load("a", str(write_adapter(tmp_path / "a", seed=seed)))
        made.append(await sampled_tokens(engine, task(prompt, adapter="a")))
        await controls_of(engine).adapters.unload("a", drain=False)
    assert made[1] == greedy(merge(load_reference(model), tmp_path / "a"), prompt, steps=STEPS)
    assert made[0] != made[1]


async def test_unknown_adapter_fails_its_request_alone(engine: VllmEngine) -> None:
    right = asyncio.create_task(sampled_tokens(engine, task()))
    with pytest.raises(NotFoundError, match="no adapter 'nobody'; loaded: none"):
        await sampled_tokens(engine, task(adapter="nobody"))
    assert len(await right) == STEPS


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        ({"rank": 9}, "rank 9; stage tested accepts a rank of at most 8, its option"),
        ({"scale": 0.5}, "64 and 32 in the model; it belongs to another|in the model; it belongs to another"),
        ({"scale": 1.5}, "in the model; it belongs to another"),
        ({"layers": 3}, "layers.2.*which the model does not have"),
    ],
)
async def test_adapter_of_another_model_is_rejected(
    engine: VllmEngine, adapter: Mapping[str, Any], message: str, tmp_path: Path
) -> None:
    folder = write_adapter(tmp_path / "wrong", **adapter)
    right = asyncio.create_task(sampled_tokens(engine, task()))
    with raises(InvalidRequestError, reason="INVALID_ADAPTER", match=message):
        await controls_of(engine).adapters.load("wrong", str(folder))
    assert len(await right) == STEPS
    assert not controls_of(engine).adapters.list_adapters()


async def test_adapter_that_vllm_rejects_leaves_no_trace(engine: VllmEngine, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "dora")
    set_config(folder, use_dora=True)
    with pytest.raises(InvalidRequestError, match="does not yet support DoRA"):
        await controls_of(engine).adapters.load("dora", str(folder))
    assert not controls_of(engine).adapters.list_adapters()
    assert not await engine.control.llm.list_loras()


async def test_more_adapters_than_slots_and_one_pinned(engine: VllmEngine, model: Path, tmp_path: Path) -> None:
    adapters = {name: write_adapter(tmp_path / name, seed=seed, rank=2 + seed) for seed, name in enumerate("abc")}
    loaded = [await controls_of(engine).adapters.load(name, str(folder)) for name, folder in adapters.items()]
    expected = [(name, 2 + seed, folder) for seed, (name, folder) in enumerate(adapters.items())]
    assert [(each.name, each.rank, Path(each.path)) for each in loaded] == expected
    with pytest.raises(OverloadedError, match=r"has 3 adapters, its max_cpu_loras \(a, b, c\)"):
        await controls_of(engine).adapters.load("d", str(write_adapter(tmp_path / "d")))
    assert (await controls_of(engine).adapters.pin("a")).pinned
    made = await asyncio.gather(*(sampled_tokens(engine, task(adapter=name)) for name in [*adapters, *adapters]))
    assert made[:3] == made[3:]
    merged = [merge(load_reference(model), folder) for folder in adapters.values()]
    assert made[:3] == [greedy(each, PROMPTS[0], steps=STEPS) for each in merged]
    with pytest.raises(OverloadedError, match="would leave none for c"):
        await controls_of(engine).adapters.pin("b")


async def test_unloading_an_adapter_in_use_fails_or_drains(engine: VllmEngine, tmp_path: Path) -> None:
    await controls_of(engine).adapters.load("a", str(write_adapter(tmp_path / "a")))
    async with aclosing(engine.submit(task(adapter="a", max_tokens=60))) as events:
        await anext(events)
        with pytest.raises(NotReadyError, match="used by 1 requests"):
            await controls_of(engine).adapters.unload("a", drain=False)
        unloading = asyncio.create_task(controls_of(engine).adapters.unload("a", drain=True))
        await collect(events)
        await unloading
    assert not controls_of(engine).adapters.list_adapters()


async def test_cancelled_drain_keeps_the_adapter(engine: VllmEngine, tmp_path: Path) -> None:
    await controls_of(engine).adapters.load("a", str(write_adapter(tmp_path / "a")))
    async with aclosing(engine.submit(task(adapter="a", max_tokens=60))) as events:
        await anext(events)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(controls_of(engine).adapters.unload("a", drain=True), 0.01)
    assert len(await sampled_tokens(engine, task(adapter="a"))) == STEPS


# -- caches, and the memory that an abort frees


async def test_cached_prompts_are_counted_and_cleared(engine: VllmEngine) -> None:
    figures = [controls_of(engine).caches.cache_statistics()]
    for clear in (False, False, True):
        if clear:
            await controls_of(engine).caches.clear_caches(preempt=False)
        await sampled_tokens(engine, task(LONG))
        figures.append(controls_of(engine).caches.cache_statistics())
    assert (figures[0].blocks, figures[0].block_tokens, figures[0].prefix_caching) == (BLOCKS, BLOCK, True)
    cached = [later.cached_tokens - earlier.cached_tokens for earlier, later in itertools.pairwise(figures)]
    assert cached == [0, len(LONG) - BLOCK, 0]
    assert figures[-1].prompt_tokens - figures[0].prompt_tokens == 3 * len(LONG)


async def test_cache_in_use_is_kept_unless_preempted(engine: VllmEngine) -> None:
    alone = await sampled_tokens(engine, task(LONG, max_tokens=SECONDS))
    await controls_of(engine).caches.clear_caches(preempt=False)
    async with aclosing(engine.submit(task(LONG, max_tokens=SECONDS))) as events:
        first = await anext(events)
        with raises(NotReadyError, reason="CACHE_IN_USE", match="running requests use the cache"):
            await controls_of(engine).caches.clear_caches(preempt=False)
        await controls_of(engine).caches.clear_caches(preempt=True)
        assert tokens_of([first, *await collect(events)]) == alone


async def test_abort_frees_its_blocks_at_once(engine: VllmEngine) -> None:
    async with aclosing(engine.submit(task(LONG, max_tokens=SECONDS))) as events:
        await anext(events)
        with pytest.raises(NotReadyError, match="running requests use"):
            await controls_of(engine).caches.clear_caches(preempt=False)
    # Succeeds only if no block is in use.
    await controls_of(engine).caches.clear_caches(preempt=False)


async def test_request_that_waits_for_blocks_starts_when_another_is_aborted(engine: VllmEngine) -> None:
    other = [token + 1 for token in LONG]
    async with aclosing(engine.submit(task(LONG, max_tokens=SECONDS))) as holder:
        await anext(holder)
        waiting = asyncio.create_task(sampled_tokens(engine, task(other, max_tokens=1)))
        held = 0
        while held < 20:
            held += sum(packet.tensors["token_ids"].size for packet in packets([await anext(holder)]))
        assert not waiting.done()
    async with asyncio.timeout(5):
        assert len(await waiting) == 1


# -- profiles


async def test_trace_is_written_into_the_callers_folder(engine: VllmEngine, profile_dir: Path) -> None:
    folder = await controls_of(engine).profiles.start("night/one", max_steps=None)
    await sampled_tokens(engine, task())
    files = await controls_of(engine).profiles.stop()
    assert folder == str(profile_dir / "night" / "one")
    assert files_in(Path(folder)) == sorted(files)
    (trace,) = [path for path in files if path.endswith(".json.gz")]
    with gzip.open(trace) as file:
        assert "aten::add" in {event.get("name") for event in json.load(file)["traceEvents"]}
    assert files_in(profile_dir) == [str(profile_dir / "night")]


async def test_second_profile_keeps_the_first(engine: VllmEngine, profile_dir: Path) -> None:
    made: list[str] = []
    for _ in range(2):
        await controls_of(engine).profiles.start(str(profile_dir / "again"), max_steps=2)
        await sampled_tokens(engine, task())
        made += await controls_of(engine).profiles.stop()
    assert len(made) == len(set(made)) == len(files_in(profile_dir / "again"))


async def test_only_one_profile_at_a_time(engine: VllmEngine) -> None:
    with raises(NotReadyError, reason="NO_PROFILE", match="records no profile"):
        await controls_of(engine).profiles.stop()
    await controls_of(engine).profiles.start("twice", max_steps=None)
    with pytest.raises(NotReadyError, match=r"already records a profile into .*twice"):
        await controls_of(engine).profiles.start("twice", max_steps=None)
    await controls_of(engine).profiles.stop()


@pytest.mark.parametrize("folder", ["..", "/etc", "a/../../b", "link/inside"])
async def test_folder_outside_profile_dir_is_rejected(
    engine: VllmEngine, profile_dir: Path, folder: str, tmp_path: Path
) -> None:
    (profile_dir / "link").unlink(missing_ok=True)
    (profile_dir / "link").symlink_to(tmp_path)
    with raises(InvalidRequestError, reason="INVALID_FOLDER", match="is outside"):
        await controls_of(engine).profiles.start(folder, max_steps=None)
    assert files_in(tmp_path) == []
    (profile_dir / "link").unlink()


# -- sleep


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU can sleep")
async def test_sleep_on_a_cpu_is_an_error(engine: VllmEngine) -> None:
    with pytest.raises(UnsupportedError, match="engine vllm of stage tested cannot sleep on cpu") as caught:
        await controls_of(engine).sleep.sleep(1)
    assert caught.value.metadata == {"engine": "vllm", "ability": "sleep", "device": "cpu"}
    assert controls_of(engine).sleep.asleep() == []
    assert len(await sampled_tokens(engine, task())) == STEPS


async def test_waking_an_awake_part_is_an_error(engine: VllmEngine) -> None:
    await controls_of(engine).sleep.wake([])
    with pytest.raises(InvalidRequestError, match="weights is not asleep; asleep: nothing"):
        await controls_of(engine).sleep.wake(["weights"])


async def test_profile_dir_must_be_absolute() -> None:
    with pytest.raises(InvalidRequestError, match="profile_dir is 'here'; it must be an absolute path"):
        VllmEngine(stage_config("vllm", model="any", options={"profile_dir": "here"}))
