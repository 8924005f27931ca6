"""The engine: turns, cancellation, failures and invalid requests."""

import asyncio
import gc
import random
import tracemalloc
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from stagemesh.common.errors import InternalError, InvalidRequestError, StagemeshError
from stagemesh.services.engines.base import Checkpoint, Paused, Progress, Task, Usage
from stagemesh.services.engines.diffusion import STATE
from stagemesh.services.engines.diffusion.engine import DiffusionEngine
from stagemesh.services.engines.diffusion.worker import DiffusionWorker
from stagemesh.services.engines.prompts import ChatMessage, Conversation, MediaFile, RawPrompt, Tool
from tests.diffusion.stages import image_options, image_task, made_frames, painting
from tests.diffusion.tiny.calls import ImageSpec
from tests.engines.support import collect
from tests.rpc.call_errors import raises

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

SMALL = ImageSpec(height=32, width=32, steps=4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(qwen_image: Path) -> AsyncGenerator[DiffusionEngine]:
    async with painting(qwen_image) as made:
        yield made


def task(spec: ImageSpec = SMALL, request_id: str = "r", **changed: Any) -> Task:
    return image_task(spec, request_id, **changed)


def worker_of(engine: DiffusionEngine) -> DiffusionWorker:
    worker: DiffusionWorker = engine._executor._worker  # type: ignore[union-attr]
    return worker


def states(engine: DiffusionEngine) -> Mapping[str, Any]:
    """Returns the states of the requests that the engine's worker knows."""
    return worker_of(engine).runner.states


async def stopped_at(engine: DiffusionEngine, one: Task, steps: int) -> None:
    """Cancels a request after it has reported `steps` steps; 0 cancels before its first event."""
    async with aclosing(engine.submit(one)) as events:
        if not steps:
            reading = asyncio.ensure_future(anext(events))
            await asyncio.sleep(0)
            reading.cancel()
            await asyncio.wait([reading])
            return
        async for event in events:
            if isinstance(event, Progress) and event.steps >= steps:
                return


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The requests of each step of any worker."""
    seen = list[list[str]]()
    stock = DiffusionWorker.step

    def step(self: DiffusionWorker, names: list[str]) -> Any:
        seen.append([name.split("/")[0] for name in names])
        return stock(self, names)

    monkeypatch.setattr(DiffusionWorker, "step", step)
    return seen


# -- turns


async def test_requests_take_turns_at_every_step(qwen_image: Path, steps: list[list[str]]) -> None:
    async with painting(qwen_image) as engine:
        await asyncio.gather(*(collect(engine.submit(task(request_id=name))) for name in "abc"))
    # The first request may run some steps while the others are encoded.
    middle = [name for names in steps for name in names][3:9]
    assert {middle.count(name) for name in "abc"} == {2}


async def test_requests_share_steps_if_that_pays(qwen_image: Path, steps: list[list[str]]) -> None:
    async with painting(qwen_image, max_batch=4) as engine:
        specs = [replace(SMALL, seed=seed, steps=30) for seed in range(4)]
        await asyncio.gather(*(collect(engine.submit(task(spec, str(spec.seed)))) for spec in specs))
    assert max(map(len, steps)) == 4


async def test_progress_is_in_order_and_usage_is_last(engine: DiffusionEngine) -> None:
    events = await collect(engine.submit(task()))
    steps_reported = [event.steps for event in events if isinstance(event, Progress)]
    assert steps_reported == sorted(set(steps_reported))
    assert steps_reported[-1] == SMALL.steps
    assert events[-1] == Usage(engine_steps=SMALL.steps, images=1)


# -- cancelling


async def test_cancel_takes_effect_within_one_step(qwen_image: Path, steps: list[list[str]]) -> None:
    async with painting(qwen_image) as engine:
        await stopped_at(engine, task(replace(SMALL, steps=100)), 3)
        at_cancel = len(steps)
        assert not states(engine)
        await collect(engine.submit(task(request_id="next")))
        assert [names for names in steps[at_cancel:] if names != ["next"]] == []
        assert at_cancel <= 5
        assert (engine.load().running, engine.load().queued, engine.load().work_s) == (0, 0, 0)


async def test_memory_stays_flat_over_five_hundred_cancels(qwen_image: Path) -> None:
    chance = random.Random(0)
    async with painting(qwen_image, max_batch=4) as engine:

        async def cancel_some(number: int) -> int:
            for _ in range(number // 2):
                pair = [task(replace(SMALL, steps=8), name) for name in "ab"]
                await asyncio.gather(*(stopped_at(engine, one, chance.randrange(5)) for one in pair))
            assert not states(engine)
            assert (engine.load().running, engine.load().queued) == (0, 0)
            # Objects that wait for the garbage collector are not growth.
            gc.collect()
            return tracemalloc.get_traced_memory()[0]

        await cancel_some(100)
        tracemalloc.start()
        try:
            before = await cancel_some(60)
            after = await cancel_some(340)
        finally:
            tracemalloc.stop()
        assert after - before < 100_000
        assert np.isfinite(await made_frames(engine, task())).all()


async def test_closing_ends_running_requests(qwen_image: Path) -> None:
    async with painting(qwen_image) as engine:
        running = asyncio.ensure_future(collect(engine.submit(task(replace(SMALL, steps=200)))))
        await stopped_at(engine, task(request_id="other"), 1)
        running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    await engine.close()


# -- failing


async def test_a_request_that_fails_in_a_batch_fails_alone(
    qwen_image: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with painting(qwen_image, max_batch=4) as engine:
        pipeline = worker_of(engine).runner.pipeline
        stock = pipeline.denoise_step

        def denoise_step(batch: Any) -> Sequence[torch.Tensor | None]:
            if any(state.inputs.seed == 1 and state.step_index == 5 for state in batch):
                raise RuntimeError("the sum overflowed")
            made: Sequence[torch.Tensor | None] = stock(batch)
            return made

        monkeypatch.setattr(pipeline, "denoise_step", denoise_step)
        specs = [replace(SMALL, seed=seed, steps=12) for seed in range(3)]
        running = (made_frames(engine, task(spec, str(spec.seed))) for spec in specs)
        made = await asyncio.gather(*running, return_exceptions=True)
        assert not states(engine)
        assert (engine.load().running, engine.load().work_s) == (0, 0)
    error = made[1]
    assert isinstance(error, InternalError)
    assert "a RuntimeError; the service's log has the cause" in error.message
    assert "RuntimeError: the sum overflowed" in caplog.text
    assert [type(one) for one in made] == [np.ndarray, InternalError, np.ndarray]


async def test_exhausted_memory_has_its_reason(engine: DiffusionEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    pipeline = worker_of(engine).runner.pipeline
    with monkeypatch.context() as patched:
        patched.setattr(pipeline, "prepare_encode", lambda _state: torch.empty(1 << 50))
        with raises(StagemeshError, reason="OUT_OF_MEMORY"):
            await collect(engine.submit(task()))
    assert np.isfinite(await made_frames(engine, task())).all()


# -- invalid requests


USER = ChatMessage("user", "a")


def message(*parts: Any) -> Conversation:
    return Conversation([ChatMessage("user", "", parts)])


def with_options(**changed: float) -> dict[str, Any]:
    return {"options": image_options(SMALL) | changed}


PNG = MediaFile("image", b"\x89PNG", "image/png")
WAV = MediaFile("audio", b"RIFF", "audio/wav")


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        *(
            (with_options(**{name: value}), f"'{name}' is {value}; {rule}")
            for name, value, rule in (
                ("height", -64, "it must be a whole number from 1 to 1024"),
                ("width", 0, "it must be a whole number from 1 to 1024"),
                ("height", 1040, "it must be a whole number from 1 to 1024"),
                ("width", 8, "it must be a multiple of 16, such as 16"),
                ("width", 64.5, "it must be a whole number from 1 to 1024"),
                ("width", float("nan"), "it must be a whole number from 1 to 1024"),
                ("num_inference_steps", 0, "it must be a whole number from 1 to 200"),
                ("num_inference_steps", 1, "this model's schedule needs 2"),
                ("num_inference_steps", 201, "it must be a whole number from 1 to 200"),
                ("guidance_scale", float("nan"), "it must be a number from 0 to 100"),
                ("guidance_scale", float("inf"), "it must be a number from 0 to 100"),
                ("guidance_scale", -1, "it must be a number from 0 to 100"),
                ("num_frames", 2, "it must be a whole number from 1 to 1"),
            )
        ),
        (with_options(eta=1), "unknown option 'eta'"),
        ({"options": {"aspect_ratio": "16:0"}}, "'16:0'; it must have the form WIDTH:HEIGHT, such as 16:9"),
        ({"options": {"aspect_ratio": "999:1"}}, "each side must be at most 1024"),
        ({"options": {"aspect_ratio": "16:9", "width": 32}}, "omit it, or omit height and width"),
        ({"options": {"output_format": "gif"}}, "it must be one of 'auto', 'png', 'jpeg', 'webp'"),
        *(({"prompt": empty}, "the prompt is empty; describe the image") for empty in ("", " \n\t", None)),
        ({"prompt": "x" * 20_001}, "the prompt has 20001 characters; this stage allows 20000"),
        ({"negative_prompt": "x" * 20_001}, "the negative prompt has 20001 characters; this stage allows 20000"),
        ({"prompt": RawPrompt((1, 2, 3))}, "a diffusion stage accepts text, but not token ids"),
        ({"prompt": RawPrompt("a cat", [PNG, PNG])}, "the prompt has 2 images; this model accepts one image"),
        ({"prompt": Conversation([USER, USER])}, "has 2 messages; a diffusion stage accepts"),
        ({"prompt": Conversation([USER], [Tool("t", "", {})])}, "accepts no tools and no template arguments"),
        ({"prompt": message("a cat", PNG, PNG)}, "the prompt has 2 images; this model accepts one image"),
        ({"prompt": message("a cat", WAV)}, "accepts images, but not audio or video"),
        ({"seed": -1}, "seed is -1; it must be from 0 to"),
        ({"seed": 1 << 63}, f"seed is {1 << 63}; it must be from 0 to"),
        ({"resume_from": Checkpoint(2)}, "the checkpoint has no tensor 'state'"),
        ({"adapter": "none such"}, "none such"),
    ],
)
async def test_invalid_input_fails_its_request(changed: dict[str, Any], error: str, engine: DiffusionEngine) -> None:
    other = asyncio.ensure_future(made_frames(engine, task(request_id="other")))
    with pytest.raises(StagemeshError, match=error) as caught:
        await collect(engine.submit(task(**changed)))
    assert not isinstance(caught.value, InternalError)
    assert np.isfinite(await other).all()
    assert (engine.load().running, engine.load().queued, len(states(engine))) == (0, 0, 0)


async def test_a_rounded_size_is_a_warning(engine: DiffusionEngine) -> None:
    *_, usage = await collect(engine.submit(task(options=image_options(replace(SMALL, height=65, width=33)))))
    assert isinstance(usage, Usage)
    (warning,) = usage.warnings
    assert (warning.reason, warning.message[:41]) == ("SIZE_ROUNDED", "the size 33x65 was rounded to 32x64, beca")


async def test_requests_too_large_for_memory_are_rejected_and_others_wait(qwen_image: Path) -> None:
    async with painting(qwen_image) as engine:
        assert engine._facts is not None
        needed = engine._facts.footprint(engine._inputs(task(), engine._facts.family))
    async with painting(qwen_image, memory_bytes=needed.denoise_bytes + needed.decode_bytes) as engine:
        with raises(InvalidRequestError, reason="EXCEEDS_MEMORY", match="request fewer pixels or frames"):
            await collect(engine.submit(task(replace(SMALL, height=512, width=512))))
        running = [asyncio.ensure_future(made_frames(engine, task(request_id=name))) for name in "abc"]
        await stopped_at(engine, task(request_id="d"), 0)
        most = 0
        while not all(one.done() for one in running):
            most = max(most, len(states(engine)))
            await asyncio.sleep(0.001)
    assert most == 1
    assert all(np.isfinite(one.result()).all() for one in running)


async def test_a_paused_task_resumes_with_the_same_bits(engine: DiffusionEngine) -> None:
    whole = await made_frames(engine, task())
    asked = task()
    async for event in engine.submit(asked):
        if isinstance(event, Progress):
            asked.pause_requested.set()
    paused = event
    assert isinstance(paused, Paused)
    assert paused.checkpoint.steps < SMALL.steps
    assert np.array_equal(await made_frames(engine, task(resume_from=paused.checkpoint)), whole)


async def paused_state(engine: DiffusionEngine) -> Checkpoint:
    *_, last = await collect(engine.submit(task(max_steps=2)))
    assert isinstance(last, Paused)
    return last.checkpoint


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"steps": 5}, "the state's num_inference_steps is 4, but the request's is 5"),
        ({"scale": 4.0}, "the state's guidance_scale is 3.0, but the request's is 4.0"),
        ({"height": 64}, "the state's height is 32, but the request's is 64"),
        ({"width": 48}, "the state's width is 32, but the request's is 48"),
        ({"seed": 9}, "the state's seed is 0, but the request's is 9"),
        ({"prompt": "another"}, "the state belongs to another prompt"),
    ],
)
async def test_the_state_of_another_is_rejected(changed: dict[str, Any], error: str, engine: DiffusionEngine) -> None:
    state = await paused_state(engine)
    with raises(InvalidRequestError, reason="INVALID_CHECKPOINT", match=error):
        await collect(engine.submit(task(replace(SMALL, **changed), resume_from=state)))
    assert not states(engine)
    assert np.isfinite(await made_frames(engine, task(resume_from=state))).all()


@pytest.mark.parametrize("damage", ["cut", "noise", "empty"])
async def test_a_damaged_state_is_rejected(damage: str, engine: DiffusionEngine) -> None:
    data = (await paused_state(engine)).tensors[STATE].tobytes()
    damaged = {"cut": data[: len(data) // 2], "noise": bytes(range(256)), "empty": b""}[damage]
    state = Checkpoint(2, tensors={STATE: np.frombuffer(damaged, np.uint8)})
    with raises(InvalidRequestError, reason="INVALID_CHECKPOINT"):
        await collect(engine.submit(task(resume_from=state)))


async def test_a_state_of_another_model_or_data_type_is_rejected(
    qwen_image: Path, tiny_diffusion: Callable[[str], Path], engine: DiffusionEngine
) -> None:
    state = await paused_state(engine)
    for other in (painting(tiny_diffusion("flux")), painting(qwen_image, dtype="bfloat16")):
        async with other as elsewhere:
            with raises(InvalidRequestError, reason="INVALID_CHECKPOINT", match="state"):
                await collect(elsewhere.submit(task(resume_from=state, negative_prompt="")))
