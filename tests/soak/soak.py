"""Runs a deployment under steady load and faults, and checks what its clients received."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from tests.deployment import Deployment, deployed
from tests.soak.delivery import Flaws
from tests.soak.faults import FaultKind
from tests.soak.footprint import growth, sampling, shared_memory
from tests.soak.injector import Injector
from tests.soak.load import Load
from tests.soak.operators import Operator, operating, unreleased
from tests.soak.report import Report
from tests.soak.work import Work
from tests.soak.workload import OUTPUT_OF, requests, units, write_pipeline

_QUIET_S = 30.0


@dataclass(frozen=True)
class Plan:
    """The plan of a soak."""

    kinds: Sequence[FaultKind] = ()
    seed: int = 1
    faults: int = 1_000_000
    """The maximum number of faults."""
    faults_s: float = 0.0
    """The number of seconds for which faults are injected. If it is 0, each request runs once more instead."""
    clients: int = 6
    replicas: int = 3
    step_s: float = 0.08
    steps: tuple[int, int] = (20, 45)
    different: int = 12
    """The number of different requests, which are repeated."""
    hits: int = 0
    """If given, faults hit only replicas that are at work on a request whose client receives its output just then. They
    continue until each kind has hit this number of requests.
    """
    most_at_once: int = 1
    """The maximum number of processes that faults hit at the same time."""
    load_s: float = 30.0
    """The maximum time in seconds for a process to become ready."""


async def soak(folder: Path, plan: Plan) -> Report:
    """Starts a deployment, runs the plan on it and stops it."""
    before = shared_memory()
    with deployed(write_pipeline(folder, replicas=plan.replicas, step_s=plan.step_s)) as up:
        report = await soak_deployment(up, plan)
    left = [f"/dev/shm/{name}" for name in sorted(shared_memory() - before)]
    return replace(report, left=[*report.left, *left])


def fake_work(plan: Plan) -> Work:
    """Compares all outputs with those of the stages' functions called one after the other."""
    return Work(requests(plan.seed, count=plan.different, steps=plan.steps), OUTPUT_OF, units)


async def soak_deployment(up: Deployment, plan: Plan, *, work: Work | None = None) -> Report:
    """Runs the plan on a running deployment, first each different request once without a fault. `work` is the requests
    for fake engines by default.
    """
    async with operating(up.admin_endpoint) as operator:
        return await _run(up, operator, plan, work or fake_work(plan))


async def _run(up: Deployment, operator: Operator, plan: Plan, work: Work) -> Report:
    load = Load(up.endpoint, work)
    injector = Injector(
        up,
        operator,
        load,
        kinds=plan.kinds,
        seed=plan.seed,
        output_of=work.output_of,
        load_s=plan.load_s,
        hits=plan.hits,
        most_at_once=plan.most_at_once,
    )
    async with sampling(up.statuses) as samples:
        await load.each_once(len(work.requests), clients=plan.clients)
        if plan.faults_s:
            await _under_faults(load, injector, plan)
    left, ended = await unreleased(up, operator, wait_s=_QUIET_S), load.ended
    flawed, timelines = dict[str, Flaws](), dict[str, object]()
    for name, delivery in ended.items():
        flaws = await asyncio.to_thread(work.judge, delivery)
        if flaws:
            flawed[name] = flaws
        if flaws or not delivery.whole():
            timelines[name] = await operator.timeline(name)
    failed = {name: each.error or "it ended without being finished" for name, each in ended.items() if not each.whole()}
    times_s = {
        kind: sorted(time_s for each in struck if (time_s := each.pause_s()) is not None)
        for kind, struck in injector.struck.items()
    }
    return Report(
        requests=len(ended),
        failed=failed,
        flawed=flawed,
        timelines=timelines,
        faults={kind.value: count for kind, count in injector.counts.items()},
        missed_faults=injector.missed,
        blows=dict(injector.blows),
        pause_s={kind: each for kind, each in times_s.items() if each},
        growth=growth(samples),
        orchestrator_mb=[each.heap_bytes >> 20 for each in samples if each.process == "orchestrator"],
        left=left,
        slowest_s=max(each.ended_s - each.begun_s for each in ended.values()),
    )


async def _under_faults(load: Load, injector: Injector, plan: Plan) -> None:
    stop = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(load.until(stop, clients=plan.clients))
        await injector.run(count=plan.faults, stop_s=plan.faults_s)
        stop.set()
