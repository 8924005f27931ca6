"""Creates an orchestrator from its config, and serves its gRPC API."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.process.settings import exports_traces
from stagemesh.orchestrator.admin.servicer import serving_admin
from stagemesh.orchestrator.config import OrchestratorConfig, ReplicaAddress
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.fleet.membership import DnsSource, MemberSource, RegistrationSource, StaticSource
from stagemesh.orchestrator.metrics.prometheus import OrchestratorMetrics
from stagemesh.orchestrator.metrics.scaling import WarmTier
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.servicer import SERVICE_NAME, OrchestratorServicer, add_orchestrator_service
from stagemesh.orchestrator.spans import is_sampled_by_caller
from stagemesh.pipeline import Limits, Pipeline, load_pipeline
from stagemesh.rpc.call_limits import CALLS_PER_CALLER
from stagemesh.rpc.callers import CLIENT
from stagemesh.rpc.server import Server, serving_metrics

if TYPE_CHECKING:
    from stagemesh.orchestrator.trace_export import TraceExport

_GRACE_S = 2.0
_RELEASE_S = 30.0
"""The time for stages to release the requests that were stopped after `drain_s`, in seconds."""


async def serve(config: OrchestratorConfig, stopping: asyncio.Event) -> None:
    """Serves the pipeline that `config` names. Returns after the event `stopping` is set."""
    pipeline = load_pipeline(config.pipeline, overrides=config.overrides, check_models=False)
    if config.generation:
        pipeline = replace(pipeline, generation=config.generation)
    async with serving(config, pipeline):
        await stopping.wait()


@asynccontextmanager
async def serving(config: OrchestratorConfig, pipeline: Pipeline) -> AsyncGenerator[int]:
    """Serves `pipeline` within the block. Yields the port for clients.

    The gRPC health status of "" and of OrchestratorService is SERVING if every stage has a ready replica, every edge is
    usable, and the orchestrator is not draining. The health status of "liveness" is always SERVING.
    """
    _check_stages(config, pipeline)
    calls = _calls_per_caller(pipeline.limits)
    server = Server.of_process(config.listen, config, roles={CLIENT}, calls_per_caller=calls)
    registration = _registration(config, pipeline)
    sources = _sources(config, pipeline, registration)
    fleet = Fleet(pipeline, sources, generations=config.generations, warm=config.warm)
    traces = _trace_export(pipeline)
    orchestrator = Orchestrator(
        pipeline,
        fleet,
        samples=traces.samples if traces is not None else is_sampled_by_caller,
        max_request_s=config.max_request_s,
        drain_s=config.drain_s,
        max_kept_state_bytes=config.max_kept_state_bytes,
    )
    if traces is not None:
        orchestrator.on_ended.append(traces.add)
    server.add(SERVICE_NAME, add_orchestrator_service, OrchestratorServicer(orchestrator, config))

    def show_readiness() -> None:
        server.set_health("", SERVICE_NAME, serving=fleet.ready)

    show_readiness()
    async with AsyncExitStack() as stack:
        # The port is bound first, because nothing else is useful without it.
        port = await stack.enter_async_context(server.serving(grace_s=_GRACE_S))
        if config.admin_listen is not None:
            await stack.enter_async_context(serving_admin(orchestrator, registration, config.admin_listen))
        if config.metrics_listen is not None:
            metrics = OrchestratorMetrics(orchestrator)
            await stack.enter_async_context(serving_metrics(metrics.collect, config.metrics_listen))
        if traces is not None:
            await stack.enter_async_context(traces.running())
        # A task group wraps errors. The errors of the ports above must be reported as they are.
        group = await stack.enter_async_context(asyncio.TaskGroup())
        # The server ends running calls last, so that clients receive the ends of their requests.
        stack.push_async_callback(server.stop, grace_s=_GRACE_S)
        await stack.enter_async_context(fleet.watched(on_change=show_readiness))
        await stack.enter_async_context(orchestrator.running())
        waking = group.create_task(WarmTier(orchestrator, config.warm).wake_replicas(), name="warm tier")
        stack.callback(waking.cancel)
        # The server rejects new calls first: clients connect again, and reach another orchestrator behind the address.
        reject = partial(server.stop, grace_s=config.drain_s + _RELEASE_S)
        stack.callback(lambda: group.create_task(reject(), name="reject new calls"))
        yield port


def _calls_per_caller(limits: Limits) -> int:
    """Returns the limit of a caller's running calls: twice the requests and sessions that `limits` permit."""
    return max(CALLS_PER_CALLER, 2 * (limits.max_in_flight + limits.max_queued + limits.max_sessions))


def _trace_export(pipeline: Pipeline) -> "TraceExport | None":
    """Returns the export of traces that the environment variables of OpenTelemetry configure, or None."""
    if not exports_traces():
        return None
    # Only an orchestrator that exports traces needs the memory of OpenTelemetry.
    from stagemesh.orchestrator.trace_export import TraceExport

    return TraceExport(pipeline.name)


def _registration(config: OrchestratorConfig, pipeline: Pipeline) -> RegistrationSource | None:
    if config.registration is None:
        return None
    return RegistrationSource(pipeline, lease_s=config.registration.lease_s, generations=config.generations)


def _sources(
    config: OrchestratorConfig, pipeline: Pipeline, registration: RegistrationSource | None
) -> list[MemberSource]:
    external = {
        stage.name: [ReplicaAddress("", address) for address in stage.addresses] for stage in pipeline.stages.values()
    }
    sources: list[MemberSource] = [StaticSource(config.replicas), StaticSource(external)]
    sources += [DnsSource(stage, name) for stage, name in config.dns.items()]
    return sources if registration is None else [*sources, registration]


def _check_stages(config: OrchestratorConfig, pipeline: Pipeline) -> None:
    registers = config.registration is not None
    found = {*(stage for stage, addresses in config.replicas.items() if addresses), *config.dns}
    found |= {stage.name for stage in pipeline.stages.values() if stage.addresses}
    without = [stage for stage in pipeline.stages if not registers and stage not in found]
    unknown = [stage for stage in (*config.replicas, *config.dns, *config.warm) if stage not in pipeline.stages]
    if without or unknown:
        raise InvalidRequestError(
            f"the config's replicas do not match pipeline {pipeline.name!r}: "
            f"stages without a replica: {', '.join(without) or 'none'}; unknown stages: {', '.join(unknown) or 'none'}"
            "; correct `replicas`, or set `registration` if replicas register themselves",
            reason="INVALID_CONFIG",
        )
