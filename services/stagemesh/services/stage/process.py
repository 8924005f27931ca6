"""The process of a stage replica. Loads the engine, and serves the replica over gRPC until the process is stopped."""

import asyncio
import contextlib
import gc
import logging
from dataclasses import asdict

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.plugins.descriptors import EXTERNAL, EngineDescriptor
from stagemesh.common.plugins.entry_points import import_factory, load_descriptor
from stagemesh.common.process.host import share_heap_among_threads
from stagemesh.common.process.lifecycle import bind_forks_to_this_process, end_within, ended_when_stuck
from stagemesh.common.process.logs import bind_process_log_context
from stagemesh.common.process.stage_process import ReplicaState, StageConfig
from stagemesh.common.tasks import result_before
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.nixl.environment import bind_to
from stagemesh.rpc.callers import OPERATOR, ORCHESTRATOR, STAGE
from stagemesh.rpc.credentials import PROCESS
from stagemesh.rpc.handlers import add_stage_service
from stagemesh.rpc.server import Server, serving_metrics
from stagemesh.services.engines.base import Engine
from stagemesh.services.stage.control_servicer import SERVICE_NAME as CONTROL_NAME
from stagemesh.services.stage.control_servicer import StageControlServicer
from stagemesh.services.stage.metrics import ReplicaMetrics
from stagemesh.services.stage.registration import registered
from stagemesh.services.stage.runtime import StageRuntime
from stagemesh.services.stage.servicer import SERVICE_NAME, StageServicer
from stagemesh.v1 import control_pb2_grpc

_STOP_GRACE_S = 1.0
_END_S, _FAILED_END_S = 25.0, 3.0
"""Time limits in seconds for the process to terminate after the time for its running steps: of a working engine, and of
one that has failed. Without a limit, the process might never terminate, because an engine that hangs may not release
its tasks or end its threads."""

_GC_THRESHOLDS = 700, 10, 10
"""The thresholds of Python's garbage collector after the engine has loaded. They are Python's own."""

_log = logging.getLogger(__name__)


async def serve(config: StageConfig, stopping: asyncio.Event) -> None:
    """Serves a replica until `stopping` is set, then finishes the replica's running steps.

    Raises the engine's error if the engine fails. The health service reports these names as SERVING:

    - "" and StageService while the replica is READY, so that orchestrators plan steps on it
    - the stage's own name while, in addition, rolling updates may count the replica as ready
    - StageControlService while the engine is loaded
    - "liveness" from the start of the server until its end
    """
    share_heap_among_threads()
    bind_process_log_context(stage=config.stage, replica=config.replica)
    bind_forks_to_this_process()
    server = Server.of_process(config.listen, config, roles={ORCHESTRATOR, STAGE, OPERATOR})
    PROCESS.permits_plain_tcp = config.permits_plain_tcp
    bind_to(config.listen)
    runtime = _make_runtime(config)
    server.add(SERVICE_NAME, add_stage_service, StageServicer(runtime))
    server.add(CONTROL_NAME, control_pb2_grpc.add_StageControlServiceServicer_to_server, StageControlServicer(runtime))
    runtime.on_shutdown = stopping.set
    lifecycle = runtime.lifecycle

    def set_serving(serving: bool) -> None:
        server.set_health("", SERVICE_NAME, serving=serving)
        lifecycle.rollout.set_available(lifecycle.is_available)

    lifecycle.on_serving = set_serving
    lifecycle.rollout.on_change = lambda: server.set_health(config.stage, serving=lifecycle.rollout.is_ready)
    server.set_health(CONTROL_NAME, serving=False)
    lifecycle.on_serving(False)
    try:
        port = await server.start()
        async with contextlib.AsyncExitStack() as stack:
            if config.metrics_listen is not None:
                collect = ReplicaMetrics(runtime).collect
                await stack.enter_async_context(serving_metrics(collect, config.metrics_listen, labels=runtime.where))
            incarnation = runtime.data_plane.incarnation
            await stack.enter_async_context(registered(config, incarnation=incarnation, port=port))
            await work(runtime, server, stopping)
            lifecycle.begin_shutdown()
    finally:
        # The steps of a failed engine have ended, or never end.
        failed = lifecycle.state is ReplicaState.FAILED
        drain_s = 0.0 if failed else config.drain_s
        end_within(_FAILED_END_S if failed else drain_s + _END_S)
        server.set_health(CONTROL_NAME, serving=False)
        await lifecycle.finish_steps(grace_s=drain_s)
        await runtime.close()
        await server.stop(grace_s=_STOP_GRACE_S)


async def work(runtime: StageRuntime, server: Server, stopping: asyncio.Event) -> None:
    """Loads the engine, then waits until `stopping` is set. Raises the engine's error if the engine fails to load, or
    if it fails or hangs later.
    """
    await result_before(stopping, runtime.start())
    if stopping.is_set():
        return
    # Freezing excludes the loaded objects from garbage collection. Collecting them takes tens of milliseconds.
    gc.collect()
    gc.freeze()
    # The program's start has made searches rare. Now they are cheap, and without them the garbage of thousands of
    # requests would accumulate.
    gc.set_threshold(*_GC_THRESHOLDS)
    # An operator may already have drained the replica.
    runtime.lifecycle.on_serving(runtime.lifecycle.state is ReplicaState.READY)
    server.set_health(CONTROL_NAME, serving=True)
    _log.info("ready")
    stall_s = runtime.config.stall_s
    async with ended_when_stuck(stall_s) if stall_s else contextlib.nullcontext():
        await result_before(stopping, runtime.watch_engine())


def _make_runtime(config: StageConfig) -> StageRuntime:
    if config.engine == EXTERNAL:
        raise InvalidRequestError(
            f"stage {config.stage} is external, so that Stagemesh has no engine for it; start the stage's own program",
            reason="INVALID_CONFIG",
        )
    descriptor = load_descriptor(EngineDescriptor, config.engine)
    data_plane = DataPlane(
        replica=config.replica, pipeline=config.pipeline, generation=config.generation, **asdict(config.data_plane)
    )
    engine: Engine = import_factory(descriptor.factory)(config)
    return StageRuntime(engine, data_plane, config, descriptor.signature(config.function, config.options))
