"""Many stage replicas in one process: real services with fake engines, each on its own port.

    python -m benchmarks.orchestrator_paths.stage_farm --orchestrator HOST:PORT --pipeline FILE --first 0 --count 25

Each replica registers with the orchestrator, as in a cluster. Runs until SIGTERM.
"""

import argparse
import asyncio
import os
from contextlib import AsyncExitStack

from benchmarks.orchestrator_paths.stamped_engine import StampedEngine
from stagemesh.common.plugins.descriptors import EngineDescriptor
from stagemesh.common.plugins.entry_points import import_factory, load_descriptor
from stagemesh.common.process.lifecycle import run_service
from stagemesh.common.process.stage_process import OrchestratorAddress, StageConfig
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.pipeline import Pipeline, Stage, load_pipeline
from stagemesh.rpc.handlers import add_stage_service
from stagemesh.rpc.server import Server
from stagemesh.services.engines.base import Engine
from stagemesh.services.stage.registration import registered
from stagemesh.services.stage.runtime import StageRuntime
from stagemesh.services.stage.servicer import StageServicer

_ARENA_BYTES = 1 << 20


async def serve_replica(
    stack: AsyncExitStack, config: StageConfig, *, stamped: bool = False, beat_s: float | None = None
) -> None:
    """Serves one replica until the stack is closed.

    - `stamped` replaces each output by the time at which it was made.
    - `beat_s` is the interval at which a stamped engine emits the outputs of all requests together.
    """
    data_plane = DataPlane(
        replica=config.replica,
        pipeline=config.pipeline,
        generation=config.generation,
        arena_bytes=_ARENA_BYTES,
        window_bytes=_ARENA_BYTES,
    )
    descriptor = load_descriptor(EngineDescriptor, config.engine)
    engine: Engine = StampedEngine(config, beat_s=beat_s) if stamped else import_factory(descriptor.factory)(config)
    runtime = StageRuntime(engine, data_plane, config, descriptor.signature(config.function, config.options))
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
        orchestrators=(OrchestratorAddress(orchestrator),),
    )


def main() -> int:
    """Serves replicas `first` to `first + count`, assigned to the pipeline's stages in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--orchestrator", required=True, help="Register at this admin address, host:port.")
    parser.add_argument("--pipeline", required=True, help="Read this pipeline file.")
    parser.add_argument("--first", type=int, required=True, help="Start with the replica of this number.")
    parser.add_argument("--count", type=int, required=True, help="Serve this number of replicas.")
    parser.add_argument("--stamped", action="store_true", help="Output the time at which each output was made.")
    parser.add_argument("--beat-s", type=float, help="Emit outputs together every this many seconds.")
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
