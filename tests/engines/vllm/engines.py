"""Starts vllm engines in the process of the tests."""

from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from pydantic import JsonValue

from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.vllm.engine import VllmEngine
from tests.engines import support
from tests.engines.support import collect, sampled_tokens, stage_config, tokens_of


@asynccontextmanager
async def started(model: Path, partitions: Arena | None = None, /, **options: JsonValue) -> AsyncGenerator[VllmEngine]:
    """Starts an engine. If it has workers that write into an arena, `partitions` are the arena's."""
    engine = VllmEngine(stage_config("vllm", model=str(model), options=options))
    if partitions is not None:
        use_partitions = engine.abilities.use_partitions
        assert use_partitions is not None
        use_partitions(partitions)
    async with support.started(engine):
        yield engine


@asynccontextmanager
async def data_plane() -> AsyncGenerator[DataPlane]:
    """Opens a data plane for the rows of an engine's workers."""
    plane = DataPlane(replica="tested-0", pipeline="p", generation="1", arena_bytes=64 << 20, window_bytes=8 << 20)
    try:
        yield plane
    finally:
        await plane.close()


@asynccontextmanager
async def started_with_arena(model: Path, **options: JsonValue) -> AsyncGenerator[VllmEngine]:
    """Starts an engine whose workers write into the arena of a data plane of its own."""
    async with data_plane() as plane, started(model, plane.arena, **options) as engine:
        yield engine


@asynccontextmanager
async def undisturbed(engine: VllmEngine, task: Task) -> AsyncGenerator[None]:
    """Runs a task during the block. Asserts that it samples the same tokens as alone."""
    alone = await sampled_tokens(engine, task)
    async with aclosing(engine.submit(task)) as events:
        first = await anext(events)
        yield
        assert tokens_of([first, *await collect(events)]) == alone
