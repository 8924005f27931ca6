"""Runs many stage replicas in one process: real services with fake engines, each on its own port.

    python -m benchmarks.orchestrator_ways.stage_farm --orchestrator HOST:PORT --pipeline FILE --first 0 --count 25

Each registers with the orchestrator, like the replicas of a cluster. Runs until SIGTERM.
"""

import argparse
import asyncio
import os
from contextlib import AsyncExitStack

from benchmarks.orchestrator_ways.stamped_engine import StampedEngine
from stagemesh.common.descriptors import import_factory, load_engine_descriptor
from stagemesh.common.process_lifecycle import run_service
from stagemesh.common.stage_config import StageConfig
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.orchestrator.spec import Pipeline, Stage, load_pipeline
from stagemesh.rpc.raw_methods import add_stage_service
from stagemesh.rpc.server import Server
from stagemesh.services.engines.base import Engine
from stagemesh.services.stage.replica.runtime import StageRuntime
from stagemesh.services.stage.service.registration import registered
from stagemesh.services.stage.service.servicer import StageServicer

_ARENA_BYTES = 1 << 20


async def serve_replica(
    stack: AsyncExitStack, config: StageConfig, *, stamped: bool = False, beat_s: float | None = None
) -> None:
    """Serves one replica until the stack is closed.

    The outputs of a `stamped` replica contain their times of emission. With `beat_s`, it emits outputs only at
    multiples of that time.
    """
    data_plane = DataPlane(
        replica=config.replica,
        pipeline=config.pipeline,
        generation=config.generation,
        arena_bytes=_ARENA_BYTES,
        window_bytes=_ARENA_BYTES,
    )
    card = load_engine_descriptor(config.engine)
    engine: Engine = StampedEngine(config, beat_s=beat_s) if stamped else import_factory(card.factory)(config)
    runtime = StageRuntime(engine, data_plane, config, card.signature(config.function, config.options))
    server = Server(config.listen)
    add_stage_service(StageServicer(runtime), server.grpc)
    port = await server.start()
    stack.push_async_callback(server.stop, grace_s=0)
    stack.push_async_callback(runtime.close)
    await runtime.start()
    server.set_health("", serving=True)
    await stack.enter_async_context(registered(config, incarnation=data_plane.incarnation, port=port))


def _config(pipeline: Pipeline, stage: Stage, *, number: int, orchestrator: str) -> StageConfig:
    return StageConfig(
        pipeline=pipeline.name,
        generation=pipeline.generation,
        stage=stage.name,
        replica=f"{stage.name}-{number}",
        engine=stage.engine,
        function=stage.function,
        options=stage.options,
        listen="127.0.0.1:0",
        orchestrators=(orchestrator,),
    )


def main() -> int:
    """Serves replicas `first` to `first + count`, assigned to the pipeline's stages in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orchestrator", required=True)
    parser.add_argument("--pipeline", required=True)
    parser.add_argument("--first", type=int, required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--stamped", action="store_true")
    parser.add_argument("--beat-s", type=float)
    arguments = parser.parse_args()
    pipeline = load_pipeline(arguments.pipeline)
    stages = list(pipeline.stages.values())

    async def serve(stopping: asyncio.Event) -> None:
        async with AsyncExitStack() as stack:
            for number in range(arguments.first, arguments.first + arguments.count):
                stage = stages[number % len(stages)]
                config = _config(pipeline, stage, number=number, orchestrator=arguments.orchestrator)
                await serve_replica(stack, config, stamped=arguments.stamped, beat_s=arguments.beat_s)
            await stopping.wait()

    return run_service(serve, parent_pid=os.getppid())


if __name__ == "__main__":
    raise SystemExit(main())
