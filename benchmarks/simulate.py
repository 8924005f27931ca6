"""Simulates placement in virtual time: the orchestrator's own code with 10 to 10,000 simulated replicas.

    python -m benchmarks.simulate --json out/simulate.json

Measures the time per decision, the memory per replica, and the latency of the slowest requests at 90 % load, compared
with round robin in the same run with the same arrivals. Nine of ten requests are small; the tenth is twenty times as
large. Also measures the recovery of requests whose replicas die at random times.
"""

import argparse
import gc
import logging
import math
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from benchmarks.report import Figure, report
from benchmarks.simulation import virtual_time
from benchmarks.simulation.round_robin import RoundRobin
from benchmarks.simulation.run import Load, Survival, latencies_s, orchestrated, survival
from stagemesh.orchestrator.planning.planner import Plan, Planner
from stagemesh.pipeline import Pipeline, Route, load_pipeline

SIZES = (10, 100, 1_000, 10_000)
REQUESTS = {10: 2_000, 100: 4_000, 1_000: 10_000, 10_000: 20_000}
"""The number of requests by number of replicas. 10,000 replicas need more for their steady load; see --steady."""
_STEADY_EACH = 30
"""The number of requests per replica of a stage after which queues stop growing."""
UTILIZATION = 0.9
LIFETIME_S = 600.0
"""The average lifetime of a replica in simulations with deaths."""
UTILIZATION_WITH_DEATHS = 0.7
_DECISIONS = 2_000
_REPEATED_UP_TO = 100
"""The largest number of replicas for which runs are repeated. Larger runs have enough requests."""
_KIB = 1024
_PIPELINE = """
pipeline: simulated
stages:
  thinker: {engine: fake, function: source}
  talker: {engine: fake, function: relay}
  vocoder: {engine: fake, function: relay}
edges: [{from: thinker, to: talker}, {from: talker, to: vocoder}]
outputs: {text: vocoder}
limits: {max_in_flight: 1000000}
"""

_console = Console(stderr=True)


@dataclass(frozen=True)
class Decisions:
    """The cost of planning with one number of replicas."""

    median_us: float
    p99_us: float
    replacement_us: float
    """The median time to choose another replica for a stage of a running request."""
    replica_bytes: float


@dataclass(frozen=True)
class Tail:
    """The 99th percentile of the latency, with the planner and with round robin."""

    planned_s: float
    round_robin_s: float

    @property
    def gain(self) -> float:
        """The latency with round robin, divided by that with the planner."""
        return self.round_robin_s / self.planned_s


async def _decide(pipeline: Pipeline, replicas: int) -> Decisions:
    gc.collect()
    tracemalloc.start()
    async with orchestrated(pipeline, replicas=replicas) as (orchestrator, _):
        gc.collect()
        size_bytes, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        planner, route = Planner(pipeline, orchestrator.fleet.registry), pipeline.route(["text"])
        taken_s = sorted(_timed(planner, route) for _ in range(_DECISIONS))
        replacement_s = [_timed_replacement(planner, planner.plan(route)) for _ in range(_DECISIONS)]
    return Decisions(
        median_us=1e6 * statistics.median(taken_s),
        p99_us=1e6 * taken_s[int(0.99 * len(taken_s))],
        replacement_us=1e6 * statistics.median(replacement_s),
        replica_bytes=size_bytes / replicas,
    )


def _timed(planner: Planner, route: Route) -> float:
    """Returns the processor time of a decision, which does not wait and is independent of other programs."""
    began_s = time.thread_time()
    plan = planner.plan(route)
    taken_s = time.thread_time() - began_s
    # Half of the requests remain, so that the loads of replicas differ.
    first = next(iter(plan.steps.values()), None)
    if first is not None and first.replica.running % 2:
        plan.release()
    return taken_s


def _timed_replacement(planner: Planner, plan: Plan) -> float:
    """Returns the processor time of replacing the first stage's replica."""
    lost = next(iter(plan.steps.values()))
    began_s = time.thread_time()
    planner.choose_again(lost.stage.name, plan, avoid=[lost.replica])
    taken_s = time.thread_time() - began_s
    plan.release()
    return taken_s


def _tail(pipeline: Pipeline, replicas: int, *, seed: int, steady: bool) -> Tail:
    steady_requests = _STEADY_EACH * replicas // len(pipeline.stages)
    load = Load(max(REQUESTS[replicas], steady_requests if steady else 0), UTILIZATION, seed)
    planned = virtual_time.run(latencies_s(pipeline, replicas=replicas, load=load))
    round_robin = virtual_time.run(latencies_s(pipeline, replicas=replicas, load=load, choice=RoundRobin()))
    return Tail(_p99(planned), _p99(round_robin))


def _survival(pipeline: Pipeline, replicas: int) -> Survival:
    load = Load(REQUESTS[replicas], UTILIZATION_WITH_DEATHS, seed=1)
    return virtual_time.run(survival(pipeline, replicas=replicas, load=load, lifetime_s=LIFETIME_S))


def _p99(taken_s: Sequence[float]) -> float:
    return sorted(taken_s)[int(0.99 * len(taken_s))]


def _figures(
    decisions: dict[int, Decisions], tails: dict[int, list[Tail]], survivals: dict[int, Survival]
) -> Iterator[Figure]:
    for size, found in decisions.items():
        goal = "<=1000" if size == max(SIZES) else ""
        subject = f"{size:,} replicas"
        yield Figure("a decision, median", found.median_us, "us", goal, subject)
        yield Figure("a decision, p99", found.p99_us, "us", "", subject)
        yield Figure("a decision after a replica died, median", found.replacement_us, "us", goal, subject)
        yield Figure("memory per replica, with its simulation", found.replica_bytes / _KIB, "KiB", "", subject)
        for name, values, unit in (
            ("p99 of requests, planned", [tail.planned_s for tail in tails[size]], "s"),
            ("p99 of requests, round robin", [tail.round_robin_s for tail in tails[size]], "s"),
        ):
            yield Figure(name, statistics.median(values), unit, "", subject)
        gain = statistics.median(tail.gain for tail in tails[size])
        yield Figure("p99, round robin / planned", gain, "ratio", ">=2" if size >= _REPEATED_UP_TO else "", subject)
        yield from _survival_figures(survivals[size], subject)
    least, most = min(decisions), max(decisions)
    if least == most:
        return
    growth = decisions[most].median_us / decisions[least].median_us
    logarithmic = math.log(most) / math.log(least)
    yield Figure("a decision, most replicas / least", growth, "ratio", f"<={logarithmic:g}", "growth")


def _survival_figures(found: Survival, subject: str) -> Iterator[Figure]:
    yield Figure("replicas that died under load", found.deaths, "", "", subject)
    yield Figure("steps that died with them", found.lost_steps, "", "", subject)
    yield Figure("requests that failed", 100 * len(found.failures) / len(found.taken_s), "%", "<=0", subject)
    if found.resume_s:
        yield Figure("until a step restarts, median", statistics.median(found.resume_s), "s", "<=1", subject)
        yield Figure("until a step restarts, p99", _p99(found.resume_s), "s", "", subject)
    yield Figure("p99 of requests, with deaths", _p99(found.taken_s), "s", "", subject)


def main() -> None:
    """Reads the command line, measures, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    parser.add_argument(
        "--repeats", type=int, default=3, help=f"Repeat runs of up to {_REPEATED_UP_TO} replicas this often."
    )
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=SIZES, choices=SIZES, help="Simulate these numbers of replicas."
    )
    parser.add_argument(
        "--steady", action="store_true", help="Run 10,000 replicas until their load is steady, for about 15 minutes."
    )
    arguments = parser.parse_args()
    # Ten thousand replicas write many log lines.
    logging.disable(logging.WARNING)
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write(_PIPELINE)
        file.flush()
        pipeline = load_pipeline(file.name)
    decisions: dict[int, Decisions] = {}
    tails: dict[int, list[Tail]] = {}
    survivals: dict[int, Survival] = {}
    for size in sorted(arguments.sizes):
        found = [virtual_time.run(_decide(pipeline, size)) for _ in range(arguments.repeats)]
        decisions[size] = sorted(found, key=lambda each: each.median_us)[len(found) // 2]
        repeats = arguments.repeats if size <= _REPEATED_UP_TO else 1
        tails[size] = [_tail(pipeline, size, seed=seed, steady=arguments.steady) for seed in range(repeats)]
        survivals[size] = _survival(pipeline, size)
        _console.print(f"{size:,} replicas: {decisions[size]} {tails[size]}")
    report("simulate", list(_figures(decisions, tails, survivals)), json_file=arguments.json)


if __name__ == "__main__":
    main()
