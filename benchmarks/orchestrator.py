"""Measures an orchestrator: processor time and delay of each output, requests per minute, memory of each request.

    python -m benchmarks.orchestrator --json out/orchestrator.json

The orchestrator is the real service in a separate process. It has 12 real stage services with fake engines (4 + 4 + 4),
by default all in one process, because twelve processes need more than two cores. 64 concurrent requests have 50 outputs
a second each, and every output contains its time of emission. To save processor time, the later stages get their input
at the end of a request. Outputs are emitted first at random times, which is the worst case for a relay, and then
together for each replica, as engines emit them.

The same requests take turns over three ways: through the orchestrator; directly from the stage, which is the baseline;
and through a bare grpc.aio relay in a separate process, which shows the cost of gRPC in Python. The lateness of an idle
event loop shows the delay that the machine itself adds.
"""

import argparse
import statistics
import tempfile
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from benchmarks.orchestrator_ways.arrivals import Arrivals, arrive
from benchmarks.orchestrator_ways.bare_loop import LATENESS, Lateness
from benchmarks.orchestrator_ways.processes import (
    Deployment,
    console,
    deployed,
    replicas_of,
    said_by,
    started,
    until_listening,
)
from benchmarks.orchestrator_ways.turns import Turn, take_turn
from benchmarks.orchestrator_ways.ways import Direct, Orchestrated, Way
from benchmarks.report import Figure, report
from stagemesh.orchestrator.launcher.ports import PortPicker
from stagemesh.orchestrator.spec import load_pipeline

REPLICAS = 12
A_MINUTE = 2_000
_OUTPUTS_PER_S = 50
_PIPELINE = """
pipeline: capacity
stages:
  thinker: {{engine: fake, function: source, options: {{step_s: {step_s}}}}}
  talker: {{engine: fake, function: relay}}
  vocoder: {{engine: fake, function: relay}}
edges: [{{from: thinker, to: talker, chunk: whole}}, {{from: talker, to: vocoder, chunk: whole}}]
outputs: {{text: thinker, echo: vocoder}}
limits: {{max_in_flight: {in_flight}}}
"""
_IN_FLIGHT = 64
"""A pipeline's default limit of concurrent requests."""
_SHORT_OUTPUTS = 16
_WARM = 16
# Enough requests to be visible in a process's memory, at a rate at which the stages are not the bottleneck.
_HELD, _HELD_STEP_S = 256, 0.25
_KIB = 1024
ORCHESTRATED, RELAYED, DIRECT = "orchestrator", "relay", "direct"


@dataclass(frozen=True)
class Options:
    """The extent of the measurement."""

    requests: int
    farms: int
    rounds: int
    window_s: float
    arrivals_s: float


@dataclass(frozen=True)
class Streams:
    """The turns of each way. Turns of one round have the same index."""

    turns: dict[str, list[Turn]]
    lateness: Lateness

    def median(self, way: str, value: Callable[[Turn], float]) -> float:
        """Returns the median over all rounds."""
        return statistics.median(value(turn) for turn in self.turns[way])

    def added_ms(self, way: str, share: float) -> float:
        """Returns the delay that a way adds to the direct way: the difference of medians."""
        return self.delay_ms(way, share) - self.delay_ms(DIRECT, share)

    def delay_ms(self, way: str, share: float) -> float:
        """Returns the delay that this fraction of the outputs does not exceed."""
        return self.median(way, lambda turn: turn.quantile_ms(share))


@dataclass(frozen=True)
class _Ways:
    """The ways by name, each with the process between client and stage."""

    orchestrated: Orchestrated
    watched: dict[str, tuple[Way, psutil.Process | None]]


async def _ways(stack: AsyncExitStack, folder: Path, deployment: Deployment) -> _Ways:
    relay = f"127.0.0.1:{PortPicker().pick()}"
    relaying = await stack.enter_async_context(started("benchmarks.orchestrator_ways.relay", "--listen", relay))
    await until_listening(relay)
    replicas, pipeline = await replicas_of(deployment), load_pipeline(str(folder / "pipeline.yaml"))
    direct = await stack.enter_async_context(Direct(pipeline, replicas))
    relayed = await stack.enter_async_context(Direct(pipeline, replicas, relay=relay))
    orchestrated = await stack.enter_async_context(Orchestrated(deployment.endpoint))
    watched: dict[str, tuple[Way, psutil.Process | None]] = {
        DIRECT: (direct, None),
        RELAYED: (relayed, relaying),
        ORCHESTRATED: (orchestrated, deployment.orchestrator),
    }
    return _Ways(orchestrated, watched)


@asynccontextmanager
async def _deployed_ways(options: Options, *, together: bool) -> AsyncGenerator[tuple[Deployment, _Ways]]:
    async with AsyncExitStack() as stack:
        folder, step_s = Path(stack.enter_context(tempfile.TemporaryDirectory())), 1 / _OUTPUTS_PER_S
        pipeline = _PIPELINE.format(step_s=step_s, in_flight=max(options.requests, _IN_FLIGHT))
        beat_s = step_s if together else None
        deploying = deployed(folder, pipeline, replicas=REPLICAS, farms=options.farms, stamped=True, beat_s=beat_s)
        deployment = await stack.enter_async_context(deploying)
        yield deployment, await _ways(stack, folder, deployment)


async def _stream(options: Options, ways: _Ways) -> Streams:
    """Runs `rounds` turns of each way, in alternation."""
    async with said_by("benchmarks.orchestrator_ways.bare_loop") as lateness:
        turns: dict[str, list[Turn]] = {name: [] for name in ways.watched}
        for number in range(options.rounds):
            for name, (way, watched) in ways.watched.items():
                turn = await take_turn(
                    way, f"{name}-{number}", requests=options.requests, window_s=options.window_s, watched=watched
                )
                turns[name].append(turn)
                console.print(f"{name}: {turn}")
        return Streams(turns, LATENESS.validate_json(await lateness()))


async def _arrive(options: Options, deployment: Deployment, ways: _Ways) -> Arrivals:
    arrivals = await arrive(
        ways.orchestrated,
        deployment.orchestrator,
        per_s=A_MINUTE / 60,
        for_s=options.arrivals_s,
        outputs=_SHORT_OUTPUTS,
    )
    console.print(f"arrivals: {arrivals}")
    return arrivals


async def _hold(options: Options) -> dict[str, Turn]:
    """Runs turns with many slow concurrent requests, in fresh processes."""
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pipeline = _PIPELINE.format(step_s=_HELD_STEP_S, in_flight=_HELD)
        deploying = deployed(folder, pipeline, replicas=REPLICAS, farms=options.farms, stamped=True)
        ways = await _ways(stack, folder, await stack.enter_async_context(deploying))
        turns: dict[str, Turn] = {}
        for name in (RELAYED, ORCHESTRATED):
            way, watched = ways.watched[name]
            await take_turn(way, f"warm-{name}", requests=_WARM, window_s=1.0, watched=watched)
            turns[name] = await take_turn(
                way, f"held-{name}", requests=_HELD, window_s=options.window_s, watched=watched
            )
            console.print(f"{name}, {_HELD} requests: {turns[name]}")
        return turns


def _of_streams(streams: Streams, subject: str) -> Iterator[Figure]:
    for way in (DIRECT, RELAYED, ORCHESTRATED):
        yield Figure(f"outputs, {way}", streams.median(way, lambda turn: turn.outputs_per_s), "1/s", "", subject)
    cpu_us = {way: streams.median(way, lambda turn: turn.cpu_per_output_us) for way in (RELAYED, ORCHESTRATED)}
    yield Figure("CPU an output, orchestrator", cpu_us[ORCHESTRATED], "us", "<=100", subject)
    yield Figure("CPU an output, bare relay", cpu_us[RELAYED], "us", "", subject)
    # 100 us on a machine on which a bare relay takes 36: the ratio does not depend on the machine's speed.
    yield Figure("CPU, orchestrator / relay", cpu_us[ORCHESTRATED] / cpu_us[RELAYED], "ratio", "<=2.8", subject)
    for name, share, goal in (("p50", 0.5, "<=1"), ("p99", 0.99, "<=10")):
        yield Figure(f"delay, {name}, direct", streams.delay_ms(DIRECT, share), "ms", "", subject)
        yield Figure(f"added by the orchestrator, {name}", streams.added_ms(ORCHESTRATED, share), "ms", goal, subject)
        yield Figure(f"added by the bare relay, {name}", streams.added_ms(RELAYED, share), "ms", "", subject)
    for name, late_ms in (("p50", streams.lateness.p50_ms), ("p99", streams.lateness.p99_ms)):
        yield Figure(f"an idle loop is late by, {name}", late_ms, "ms", "", subject)


def _figures(
    apart: Streams, together: Streams, arrivals: Arrivals, held: dict[str, Turn], options: Options
) -> Iterator[Figure]:
    what = f"{options.requests} requests at once, {_OUTPUTS_PER_S} outputs a second each"
    yield from _of_streams(apart, f"{what}, each in its own time")
    yield from _of_streams(together, f"{what}, all of a replica together")

    subject = f"{A_MINUTE} requests a minute, {_SHORT_OUTPUTS} outputs each"
    yield Figure("finished", arrivals.finished_per_minute, "1/min", f">={0.98 * A_MINUTE:g}", subject)
    yield Figure("waited to be admitted", arrivals.queued, "requests", "<=0", subject)
    yield Figure("refused", arrivals.refused, "requests", "<=0", subject)
    yield Figure("in flight, second half / first half", arrivals.growth, "ratio", "<=1.25", subject)
    yield Figure("until admitted, p99", arrivals.admitted_p99_ms, "ms", "", subject)
    yield Figure("orchestrator CPU a request", arrivals.cpu_per_request_ms, "ms", "", subject)

    subject = f"{_HELD} requests in flight"
    yield Figure("outputs of each", held[ORCHESTRATED].outputs_each, "", "", subject)
    for way, goal in ((ORCHESTRATED, "<=64"), (RELAYED, "")):
        size_kib = held[way].grown_bytes / _HELD / _KIB
        what = "a request, orchestrator" if way == ORCHESTRATED else "a stream, bare relay (2 gRPC calls)"
        yield Figure(f"memory of {what}", size_kib, "KiB", goal, subject)


async def _measure(options: Options) -> list[Figure]:
    async with _deployed_ways(options, together=False) as (deployment, ways):
        apart = await _stream(options, ways)
        arrivals = await _arrive(options, deployment, ways)
    async with _deployed_ways(options, together=True) as (_, ways):
        together = await _stream(options, ways)
    return list(_figures(apart, together, arrivals, await _hold(options), options))


def main() -> None:
    """Reads the command line, measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--requests", type=int, default=64, help="number of concurrent requests (default: %(default)s)")
    parser.add_argument(
        "--farms", type=int, default=1, help="number of processes for the replicas (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="number of turns of each way (default: %(default)s)")
    parser.add_argument(
        "--window-s", type=float, default=5.0, help="length of each turn in seconds (default: %(default)s)"
    )
    parser.add_argument(
        "--arrivals-s", type=float, default=20.0, help="seconds in which requests arrive (default: %(default)s)"
    )
    arguments = parser.parse_args()
    options = Options(
        requests=arguments.requests,
        farms=arguments.farms,
        rounds=arguments.rounds,
        window_s=arguments.window_s,
        arrivals_s=arguments.arrivals_s,
    )
    report("orchestrator", uvloop.run(_measure(options)), json_file=arguments.json)


if __name__ == "__main__":
    main()
