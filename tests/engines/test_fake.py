"""The fake engine."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from stagemesh.connectors.errors import InternalError, InvalidRequestError, NotFoundError, UnsupportedError
from stagemesh.services.engines.base import SamplingOptions, Task, Usage
from stagemesh.services.engines.fake import CARD
from stagemesh.services.engines.fake.engine import FakeEngine
from stagemesh.services.serving.plugins import load_engine_card
from tests.engines.support import collect, packets, stage_config, text_of, text_stream


def fake(function: str = "source", **options: float) -> FakeEngine:
    return FakeEngine(stage_config("fake", function=function, options=options))


def test_card_is_found_by_name() -> None:
    assert load_engine_card("fake") is CARD


def test_unknown_function_names_those_known() -> None:
    with pytest.raises(NotFoundError, match="known: source, relay, frames"):
        CARD.signature("sauce", {})


def test_unknown_option_is_answered_with_close_ones() -> None:
    with pytest.raises(InvalidRequestError, match=r"unknown option 'stepps'.*steps"):
        fake(stepps=3)


def test_option_of_wrong_type_is_named() -> None:
    with pytest.raises(InvalidRequestError, match=r"option steps is 1\.5"):
        fake(steps=1.5)


async def test_source_repeats_for_the_same_seed() -> None:
    first, second = [await collect(fake().submit(Task("r", seed=7, prompt="hi"))) for _ in range(2)]
    assert text_of(first) == text_of(second)
    assert text_of(first) != text_of(await collect(fake().submit(Task("r", seed=8, prompt="hi"))))


async def test_max_tokens_sets_a_sources_steps() -> None:
    events = await collect(fake(size_bytes=10).submit(Task("r", 0, "hi", sampling=SamplingOptions(max_tokens=2))))
    assert events[-1] == Usage(prompt_tokens=2, output_tokens=20, steps=2)


async def test_relay_passes_text_on() -> None:
    events = await collect(fake("relay").submit(Task("r", 0, inlets={"in": text_stream("ab", "c")})))
    assert [packet.tensors["text"].tobytes() for packet in packets(events)] == [b"ab", b"c"]


async def test_frames_are_one_a_byte() -> None:
    events = await collect(fake("frames").submit(Task("r", 0, inlets={"in": text_stream("ab")})))
    frames = packets(events)[0].tensors["frames"]
    assert frames.shape == (2, 8)
    assert frames.dtype == np.float32


async def test_failure_comes_at_the_step_asked_for() -> None:
    seen = 0
    with pytest.raises(InternalError, match="step 2"):
        async for _ in fake(fail_at_step=2).submit(Task("r", 0, "hi")):
            seen += 1
    assert seen == 4  # an emission and a progress for each of two steps


async def test_tasks_over_the_limit_are_queued() -> None:
    engine = fake(max_running=1, step_s=0.01)
    async with aclosing(engine.submit(Task("a", 0, "hi"))) as first:
        await anext(first)
        second = asyncio.create_task(collect(engine.submit(Task("b", 0, "hi"))))
        await asyncio.sleep(0)
        assert (engine.load().running, engine.load().queued) == (1, 1)
    await second
    assert engine.load().running == 0


async def test_pausing_is_refused() -> None:
    with pytest.raises(UnsupportedError):
        await collect(fake().submit(Task("r", 0, "hi", max_steps=1)))
