"""Runs codec language models in the vllm engine."""

from collections.abc import Callable
from contextlib import aclosing
from dataclasses import replace

import numpy as np
from pydantic import JsonValue

from stagemesh.common.wire.tensors import Array
from stagemesh.services.engines.base import Checkpoint, Emission, Task
from stagemesh.services.engines.vllm.engine import VllmEngine


def codec_options(model: str) -> dict[str, JsonValue]:
    """Returns the options of a stage that runs the codec language model with this name."""
    return {
        "dtype": "float32",
        "kv_cache_memory_bytes": 1 << 20,
        "max_model_len": 512,
        "max_num_batched_tokens": 16,
        "enable_chunked_prefill": True,
        "checkpoint_tokens": 8,
        "codec": {"model": model, "dtype": "float32"},
    }


async def codes_of(engine: VllmEngine, task: Task, *, preempt_after: frozenset[int] = frozenset()) -> Array:
    """Runs a task and returns its codes, [frames, groups].

    All requests are preempted after each of these numbers of emissions.
    """
    parts = list[Array]()
    async with aclosing(engine.submit(task)) as events:
        async for event in events:
            if isinstance(event, Emission) and "codes" in event.packet.tensors:
                parts.append(event.packet.tensors["codes"])
                if len(parts) in preempt_after:
                    await engine.control.clear_caches(preempt=True)
    return np.concatenate(parts)


async def check_resumed(engine: VllmEngine, make_task: Callable[[], Task]) -> None:
    """Asserts that a request that resumes from its first checkpoint emits the rest of its codes."""
    whole = await codes_of(engine, make_task())
    emitted, checkpoint = 0, Checkpoint(0)
    async with aclosing(engine.submit(make_task())) as events:
        async for event in events:
            if isinstance(event, Emission):
                emitted += len(event.packet.tensors.get("codes", ()))
            if isinstance(event, Checkpoint):
                checkpoint = replace(event, rows={"codes": emitted})
                break
    assert 0 < emitted <= checkpoint.steps
    resumed = replace(make_task(), resume_from=checkpoint)
    assert (await codes_of(engine, resumed)).tolist() == whole[emitted:].tolist()
