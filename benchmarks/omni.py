"""Measures an omni model in three stages, thinker, talker and code2wav: chunked audio against whole, and under load.

The model is a tiny Qwen3-Omni with random weights. A request has a prompt of 12 tokens, 32 text tokens and 64 codec
tokens. Its audio is played as that of a real codec: each frame lasts 80 ms.

- The closed loads run 1, 4 and 10 requests at once, in alternation with requests whose code2wav has `chunk: whole`. One
  deployment runs both, because the processes of two deployments differ in speed by up to 10 %. A ratio is the median
  over the repeats of the ratio of a repeat's medians.
- The open loads send requests at random times (Poisson arrivals), at fractions of the measured capacity: the requests
  a second of the largest closed load. They run in rounds. Each round first measures the capacity again, because the
  speed of a virtual machine changes within minutes. A percentile is the median over the rounds.
- First playable audio is the arrival of the first chunk from which on play-out does not starve at once: the audio
  until then lasts until the next chunk arrives.
- An underrun is a time in which the listener, who starts at the first chunk, hears nothing before the end of the audio.
  C50 is the percentage of streams whose longest underrun is under 50 ms.
- The hop from the talker to the vocoder begins when the talker's engine emits the frame that completes a chunk and ends
  when the vocoder is called with it. What an event loop of an otherwise idle process is late meanwhile is subtracted.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.edge_ways.findings import say
from benchmarks.omni_streams.deployment import Deployment, deployed, prepare
from benchmarks.omni_streams.loads import Load, Stream, closed, opened
from benchmarks.omni_streams.playout import first_playable_s, worst_underrun_s
from benchmarks.omni_streams.stamps import Stamps, read, token_hops_ms, vocoder_hops_ms
from benchmarks.orchestrator_paths.idle_loop import LATENESS, Lateness
from benchmarks.orchestrator_paths.processes import reporting_process
from benchmarks.report import Figure, report

CHUNKED, WHOLE = "chunked", "whole"
C50_S = 0.05
"""The longest underrun of a stream that counts for C50."""
REFERENCE, LOADED = 10, 80
"""The open loads, in percent of the capacity, of the goals: the delays of the second one are compared to the first."""
HOP_GOALS = {0.5: "<=1", 0.99: "<=5"}
SINGLE_GOALS = {1: "<=1.5", 4: "<=3.0"}
RATIOS: Sequence[tuple[str, Callable[[Stream], float], str]] = (
    ("first audio", lambda stream: stream.first_audio_s, "<=0.35"),
    ("whole request", lambda stream: stream.total_s, "<=1.03"),
    ("first text", lambda stream: stream.first_text_s, "<=1.1"),
)
_MB_PER_GB = 1000


@dataclass(frozen=True)
class Options:
    """The size of the measurement."""

    repeats: int = 9
    each: int = 2
    """The number of requests that each caller of a closed load sends in a repeat."""
    at_once: Sequence[int] = (1, 4, 10)
    rounds: int = 5
    arrivals: Mapping[int, int] = field(default_factory=lambda: {REFERENCE: 8, 50: 20, LOADED: 80, 95: 30})
    """The number of requests of each open load of a round, by the percentage of the capacity."""


QUICK = Options(repeats=1, each=1, at_once=(1, 4), rounds=1, arrivals={REFERENCE: 2, LOADED: 6})


@dataclass(frozen=True)
class Measured:
    """A load, and how late an idle event loop was meanwhile."""

    load: Load
    late: Lateness


@dataclass(frozen=True)
class Round:
    """The open loads of a round."""

    capacity_per_s: float
    """The requests a second of the largest closed load."""
    loads: Mapping[int, Measured]
    """The loads by the percentage of the capacity."""


@dataclass
class Results:
    """All measurements."""

    ready_s: float
    closed: dict[int, dict[str, list[Load]]] = field(default_factory=dict[int, dict[str, list[Load]]])
    """The loads of each repeat by the number of requests at once, chunked and whole."""
    taken_s: dict[int, list[float]] = field(default_factory=dict[int, list[float]])
    """The time in which requests that were sent at once ended, by their number."""
    late: dict[int, Lateness] = field(default_factory=dict[int, Lateness])
    rounds: list[Round] = field(default_factory=list[Round])
    starting_cpu_s: dict[str, float] = field(default_factory=dict[str, float])
    cpu_s: dict[str, float] = field(default_factory=dict[str, float])
    """The processor time during the open loads, by process."""
    memory_mb: dict[str, float] = field(default_factory=dict[str, float])
    """The resident memory after all loads, by process."""

    @property
    def open_streams(self) -> dict[int, list[Sequence[Stream]]]:
        """The requests of each round's open loads, by the percentage of the capacity."""
        return {percent: [each.loads[percent].load.streams for each in self.rounds] for percent in self.rounds[0].loads}


async def measure(options: Options) -> tuple[Results, list[Figure]]:
    """Starts the pipeline and runs all loads. Returns the results, and the figures of the edges."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        await prepare(folder)
        async with deployed(folder) as running:
            results = Results(running.ready_s, starting_cpu_s=running.cpu_s())
            say(f"ready after {running.ready_s:.1f} s")
            await _run_single(results, running, options)
            for at_once in options.at_once:
                await _run_closed(results, running, at_once, options)
            await _run_open(results, running, options)
            results.memory_mb = running.memory_mb()
            return results, list(_edge_figures(results, read(running.stamps)))


async def _run_single(results: Results, running: Deployment, options: Options) -> None:
    await closed(running.client, concurrent=max(SINGLE_GOALS), each=1)
    for at_once in SINGLE_GOALS:
        loads = [await closed(running.client, concurrent=at_once, each=1) for _ in range(options.repeats)]
        results.taken_s[at_once] = [load.seconds for load in loads]


async def _run_closed(results: Results, running: Deployment, at_once: int, options: Options) -> None:
    loads = results.closed[at_once] = {name: list[Load]() for name in (CHUNKED, WHOLE)}
    for name in loads:
        await closed(running.client, concurrent=at_once, each=1, whole=name == WHOLE)
    async with reporting_process("benchmarks.orchestrator_paths.idle_loop") as lateness:
        for repeat in range(options.repeats):
            # Each repeat begins with the other one, because the second load finds warmer caches.
            for name in list(loads)[:: -1 if repeat % 2 else 1]:
                load = await closed(running.client, concurrent=at_once, each=options.each, whole=name == WHOLE)
                loads[name].append(load)
        results.late[at_once] = LATENESS.validate_json(await lateness())
    say(f"closed load, {_at_once(at_once)}: {loads[CHUNKED][-1].requests_per_s:.2f} requests/s")


async def _run_open(results: Results, running: Deployment, options: Options) -> None:
    before_s = running.cpu_s()
    for number in range(options.rounds):
        full = await closed(running.client, concurrent=max(options.at_once), each=options.each)
        loads: dict[int, Measured] = {}
        for percent, requests in options.arrivals.items():
            per_s = percent / 100 * full.requests_per_s
            async with reporting_process("benchmarks.orchestrator_paths.idle_loop") as lateness:
                load = await opened(running.client, per_s=per_s, requests=requests, seed=number)
                loads[percent] = Measured(load, LATENESS.validate_json(await lateness()))
            say(f"open load, {percent} %: {requests} requests, {per_s:.2f} a second")
        results.rounds.append(Round(full.requests_per_s, loads))
    results.cpu_s = {name: after_s - before_s[name] for name, after_s in running.cpu_s().items()}


def figures(results: Results) -> Iterator[Figure]:
    """Yields the figures that need no stamps."""
    yield from _single_figures(results)
    for at_once, loads in results.closed.items():
        yield from _closed_figures(at_once, loads)
    yield from _open_figures(results)
    yield from _process_figures(results)


def _single_figures(results: Results) -> Iterator[Figure]:
    subject = "one pipeline"
    yield Figure("all services ready after", results.ready_s, "s", "<=40", subject)
    for at_once, goal in SINGLE_GOALS.items():
        taken_s = statistics.median(results.taken_s[at_once])
        yield Figure(f"12 prompt, 32 text, 64 codec tokens, {_at_once(at_once)}", taken_s, "s", goal, subject)


def _closed_figures(at_once: int, loads: Mapping[str, Sequence[Load]]) -> Iterator[Figure]:
    subject = f"closed load, {_at_once(at_once)}"
    for name, value, goal in RATIOS:
        ratio = statistics.median(
            _median(chunked, value) / _median(whole, value)
            for chunked, whole in zip(loads[CHUNKED], loads[WHOLE], strict=True)
        )
        yield Figure(f"{name}, chunked / whole", ratio, "ratio", goal, subject)
    rates = [[load.tokens_per_s for load in loads[name]] for name in (CHUNKED, WHOLE)]
    ratio = statistics.median(chunked / whole for chunked, whole in zip(*rates, strict=True))
    yield Figure("tokens a second, chunked / whole", ratio, "ratio", ">=0.97", subject)
    for name, value, _ in RATIOS:
        for way, each in loads.items():
            yield Figure(f"{name}, {way}", statistics.median(_median(load, value) for load in each), "s", "", subject)
    yield Figure("tokens a second, chunked", statistics.median(rates[0]), "1/s", "", subject)
    factor = statistics.median(_median(load, lambda stream: stream.total_s / stream.audio_s) for load in loads[CHUNKED])
    yield Figure("real-time factor of a stream", factor, "ratio", "", subject)


def _open_figures(results: Results) -> Iterator[Figure]:
    capacity_per_s = statistics.median(each.capacity_per_s for each in results.rounds)
    all_streams = results.open_streams
    for percent, rounds in all_streams.items():
        subject = f"open load, {percent} % of {capacity_per_s:.2f} requests a second"
        for share in (0.5, 0.95):
            first_s = statistics.median(_first_playable_s(streams, share) for streams in rounds)
            yield Figure(f"first playable audio, p{100 * share:.0f}", 1e3 * first_s, "ms", "", subject)
        if percent == LOADED and REFERENCE in all_streams:
            ratio = statistics.median(
                _first_playable_s(streams, 0.95) / _first_playable_s(quiet, 0.5)
                for streams, quiet in zip(rounds, all_streams[REFERENCE], strict=True)
            )
            yield Figure(f"first playable audio, p95 / p50 at {REFERENCE} %", ratio, "ratio", "<=3", subject)
        underruns_s = [worst_underrun_s(stream.chunks) for streams in rounds for stream in streams]
        smooth = sum(underrun_s < C50_S for underrun_s in underruns_s) / len(underruns_s)
        yield Figure("C50", 100 * smooth, "%", ">=99" if percent == LOADED else "", subject)
        yield Figure("longest underrun", 1e3 * max(underruns_s), "ms", "", subject)
        stream_s = statistics.mean(stream.audio_s for streams in rounds for stream in streams)
        yield Figure("audio made a second", percent / 100 * capacity_per_s * stream_s, "s/s", "", subject)


def _first_playable_s(streams: Sequence[Stream], share: float) -> float:
    return _quantile(sorted(first_playable_s(stream.chunks) for stream in streams), share)


def _edge_figures(results: Results, stamps: Mapping[str, Mapping[int, Stamps]]) -> Iterator[Figure]:
    streams = results.closed[1][CHUNKED][-1].streams
    for edge in streams[-1].edges:
        subject = f"edge {edge.edge}, {edge.connector}"
        yield Figure("a request's bytes", edge.size_bytes, "bytes", "", subject)
        yield Figure("a request's chunks", edge.chunks, "", "", subject)
    loads = {_at_once(at_once): (ways[CHUNKED], results.late[at_once]) for at_once, ways in results.closed.items()}
    for percent in results.rounds[0].loads:
        measured = [each.loads[percent] for each in results.rounds]
        late = Lateness(
            statistics.median(each.late.p50_ms for each in measured),
            statistics.median(each.late.p99_ms for each in measured),
        )
        loads[f"open load, {percent} %"] = [each.load for each in measured], late
    for name, (each, late) in loads.items():
        seeds = [seed for load in each for seed in load.seeds]
        goals = HOP_GOALS if name == _at_once(1) else {}
        yield from _hop_figures(vocoder_hops_ms(stamps, seeds), late, goals, f"hop from talker to vocoder, {name}")
        yield from _hop_figures(token_hops_ms(stamps, seeds), late, {}, f"hop from thinker to talker, {name}")


def _hop_figures(
    hops_ms: Sequence[float], late: Lateness, goals: Mapping[float, str], subject: str
) -> Iterator[Figure]:
    for share, name, late_ms in ((0.5, "p50", late.p50_ms), (0.99, "p99", late.p99_ms)):
        hop_ms = _quantile(hops_ms, share)
        yield Figure(f"{name} over an idle event loop", hop_ms - late_ms, "ms", goals.get(share, ""), subject)
        yield Figure(name, hop_ms, "ms", "", subject)


def _process_figures(results: Results) -> Iterator[Figure]:
    subject = "processes, each with its children"
    total_gb = sum(results.memory_mb.values()) / _MB_PER_GB
    yield Figure("resident memory, all", total_gb, "GB", "<=4", subject)
    rounds = itertools.chain.from_iterable(results.open_streams.values())
    audio_s = sum(stream.audio_s for streams in rounds for stream in streams)
    for name, memory_mb in results.memory_mb.items():
        yield Figure(f"resident memory, {name}", memory_mb, "MB", "", subject)
        yield Figure(f"processor time until ready, {name}", results.starting_cpu_s[name], "s", "", subject)
        yield Figure(f"processor time under open loads, {name}", results.cpu_s[name], "s", "", subject)
        yield Figure(
            f"processor time a second of audio, {name}", 1e3 * results.cpu_s[name] / audio_s, "ms", "", subject
        )


def _median(load: Load, value: Callable[[Stream], float]) -> float:
    return statistics.median(map(value, load.streams))


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[int(share * len(ordered))]


def _at_once(at_once: int) -> str:
    return f"{at_once} request{'s' if at_once > 1 else ''} at once"


def main() -> None:
    """Reads the command line, measures, and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    parser.add_argument("--quick", action="store_true", help="Run only a few requests, to see whether all parts work.")
    arguments = parser.parse_args()
    results, edges = asyncio.run(measure(QUICK if arguments.quick else Options()))
    load = Figure("load average of the last minute", os.getloadavg()[0], "processes", "", "machine")
    report("omni", [*figures(results), *edges, load], json_file=arguments.json)


if __name__ == "__main__":
    main()
