"""Measures the autoregressive stage: tokens through its gRPC service against AsyncLLM called directly.

Both have the same arguments, run at the same time and take turns. A ratio is the median over the repeats of the ratio
within a repeat. Each engine step's tokens are one message. With hidden states, the rows of every token also go to
another process. The stage, the directly called engine, the client, the consumer and the engines' cores are separate
processes.

A stall is the delay of a timer of the stage's event loop. It excludes the time in which other processes had the
processors, and the time in which idle loops, one on each processor, were late as well.
"""

import argparse
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pydantic import JsonValue

from benchmarks.ar_ways.client import StageClient
from benchmarks.ar_ways.direct import MODEL, DirectEngine
from benchmarks.ar_ways.loop_probe import BareLoop, Stalls, stalls
from benchmarks.ar_ways.models import LARGER, SMALLER, Shape, write_model
from benchmarks.ar_ways.processes import own_mb, started_mb
from benchmarks.ar_ways.staged import ARENA_BYTES, EMITS_STATES, StagedEngine
from benchmarks.ar_ways.taker import StatesTaker
from benchmarks.ar_ways.turns import Times, Way, take_turns
from benchmarks.ar_ways.workload import Outcome, Turn
from benchmarks.edge_ways.findings import say
from benchmarks.edge_ways.worker import Held, Place, Worker
from benchmarks.report import Figure, report
from benchmarks.stage_process import READY_S

STREAMS = (1, 8, 32)
DIRECT, STAGE, STATES = "direct", "stage", "stage, hidden states over shm"
GOALS: Mapping[str, Mapping[str, str]] = {
    LARGER.name: {STAGE: ">=0.95", STATES: ">=0.90"},
    SMALLER.name: {STAGE: ">=0.75"},
}
"""The speed of each way relative to the direct one."""
START = "start"
STARTS = 3
PROBED_S = 8.0


@dataclass
class Findings:
    """The measurements of one model."""

    shape: Shape
    times: dict[int, Times] = field(default_factory=dict[int, Times])
    """The results by number of streams."""
    memory_mb: dict[str, float] = field(default_factory=dict[str, float])
    """The memory of the front end after all turns, and of the engine's processes after the turns with one stream.

    An engine keeps about a megabyte for each batch size that occurred. With more than one stream these sizes are
    random.
    """
    all_memory_mb: dict[str, float] = field(default_factory=dict[str, float])
    """The memory after all turns."""
    stalls: dict[str, Stalls] = field(default_factory=dict[str, Stalls])

    def figures(self) -> list[Figure]:
        """Returns the figures that have goals."""
        subject = f"{self.shape.name} parameters"
        found = [
            Figure(f"tokens, {way} / direct, {_text(streams)}", times.ratio(way, DIRECT), "ratio", goal, subject)
            for way, goal in GOALS[self.shape.name].items()
            for streams, times in self.times.items()
        ]
        more_mb = self.memory_mb[STAGE] - self.memory_mb[DIRECT]
        found.append(
            Figure(f"memory, stage with {ARENA_BYTES >> 20} MiB arena over direct", more_mb, "MB", "<=60", subject)
        )
        for way, seen in self.stalls.items():
            what = f"event loop, {way}, {_text(STREAMS[-1])}"
            found.append(Figure(f"{what}: stalled at most", seen.stalled_ms, "ms", "<=20", subject))
            found.append(Figure(f"{what}: late at most", seen.late_ms, "ms", "", subject))
            found.append(Figure(f"{what}: late at most, bare loops beside", seen.bare_ms, "ms", "", subject))
            found.append(Figure(f"{what}: longest work of its own", seen.worked_ms, "ms", "", subject))
        return found

    def details(self) -> list[Figure]:
        """Returns the measurements behind the figures."""
        subject = f"{self.shape.name} parameters"
        found = [
            Figure(f"memory after batches of all sizes, {way}", memory_mb, "MB", "", subject)
            for way, memory_mb in self.all_memory_mb.items()
        ]
        for streams, times in self.times.items():
            for unit, name, values in (
                ("1/s", "tokens", times.tokens_per_s),
                ("µs", "processor time of the front end, a token", times.front_end_us),
                ("", "messages, a token", times.messages),
            ):
                subject = f"{self.shape.name} parameters, {_text(streams)}"
                found.extend(
                    Figure(f"{name}, {way}", statistics.median(values[way]), unit, "", subject) for way in values
                )
        return found


def measure_model(shape: Shape, folder: Path) -> Findings:
    """Measures all ways of one model."""
    findings = Findings(shape)
    model = write_model(folder / shape.name, shape)
    with ExitStack() as stack:
        direct = _direct(stack, model)
        options = EMITS_STATES if STATES in GOALS[shape.name] else dict[str, JsonValue]()
        staged = stack.enter_context(StagedEngine(folder, model=model, name=shape.name, options=options))
        ways = _ways(stack, direct, staged, wanted=GOALS[shape.name])
        say(f"{shape.name}: {', '.join(ways)} are up")
        front_ends = {name: ways[name].front_end for name in (STAGE, DIRECT)}
        engines_mb = dict[str, float]()
        for streams in STREAMS:
            findings.times[streams] = take_turns(list(ways.values()), streams=streams, name=f"turn-{streams}")
            say(f"{shape.name}: {_text(streams)}")
            engines_mb = engines_mb or {name: started_mb(process) for name, process in front_ends.items()}
        findings.memory_mb = {name: own_mb(process) + engines_mb[name] for name, process in front_ends.items()}
        findings.all_memory_mb = {name: own_mb(process) + started_mb(process) for name, process in front_ends.items()}
        for name in GOALS[shape.name]:
            findings.stalls[name] = _probed(staged, ways[name])
            say(f"{shape.name}: event loop, {name}")
    return findings


def measure_starts(folder: Path) -> Figure:
    """Measures the time from a process's start until its engine answers, and until its stage is READY."""
    model = write_model(folder / "starts", SMALLER)
    ratios: list[float] = []
    for number in range(STARTS):
        began_s = time.monotonic()
        with ExitStack() as stack:
            _direct(stack, model)
            direct_s = time.monotonic() - began_s
        began_s = time.monotonic()
        with StagedEngine(folder, model=model, name=f"start-{number}"):
            staged_s = time.monotonic() - began_s
        say(f"start {number + 1} of {STARTS}: stage {staged_s:.1f} s, direct {direct_s:.1f} s")
        ratios.append(staged_s / direct_s)
    return Figure("start until ready, stage / direct", statistics.median(ratios), "ratio", "<=1.5", "start")


def _ways(
    stack: ExitStack, direct: Worker[DirectEngine], staged: StagedEngine, *, wanted: Mapping[str, str]
) -> dict[str, Way]:
    client = _entered(stack, Worker(StageClient, (), Place()))
    client.call(StageClient.connect, staged.endpoint)
    ways = {
        STAGE: Way(STAGE, staged.process_id, lambda turn: client.call(StageClient.run, turn, None)),
        DIRECT: Way(DIRECT, direct.call(DirectEngine.process_id), lambda turn: direct.call(DirectEngine.run, turn)),
    }
    if STATES in wanted:
        taker = _entered(stack, Worker(StatesTaker, (), Place()))
        ways[STATES] = Way(STATES, staged.process_id, partial(_with_states, client, taker))
    return ways


def _with_states(client: Worker[StageClient], taker: Worker[StatesTaker], turn: Turn) -> Outcome:
    turn = replace(turn, name=f"{turn.name}-states")
    taker.call(StatesTaker.begin, turn)
    outcome = client.call(StageClient.run, turn, taker.call(StatesTaker.where))
    taker.call(StatesTaker.end)
    return outcome


def _probed(staged: StagedEngine, way: Way) -> Stalls:
    """Probes the stage's loop, and idle loops, one on each processor."""
    with ExitStack() as stack:
        processors = sorted(os.sched_getaffinity(0))
        bare = {processor: _entered(stack, Worker(BareLoop, (), Place())) for processor in processors}
        for processor, loop in bare.items():
            loop.call(BareLoop.begin, processor)
        staged.begin_probe()
        end_s = time.monotonic() + PROBED_S
        for number in itertools.count():
            way.run(Turn(f"probed-{number}", STREAMS[-1]))
            if time.monotonic() > end_s:
                break
        ticks = staged.end_probe()
        return stalls(ticks, [tick for loop in bare.values() for tick in loop.call(BareLoop.end)])


def _direct(stack: ExitStack, model: Path) -> Worker[DirectEngine]:
    place = Place(environment={MODEL: str(model), "VLLM_LOGGING_LEVEL": "ERROR"})
    return _entered(stack, Worker(DirectEngine, (), place, starts_processes=True))


def _entered(stack: ExitStack, worker: Worker[Held]) -> Worker[Held]:
    stack.callback(worker.close)
    worker.ready(within_s=READY_S)
    return worker


def _text(streams: int) -> str:
    return "1 stream" if streams == 1 else f"{streams} streams"


def main() -> None:
    """Reads the command line, measures and reports."""
    # Applies to the processes that this one starts.
    os.environ |= {"GRPC_VERBOSITY": "ERROR", "PYTHONWARNINGS": "ignore"}
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--only", choices=[SMALLER.name, LARGER.name, START], help="measure this part only (default: all)"
    )
    arguments = parser.parse_args()
    parts = [arguments.only] if arguments.only else [LARGER.name, SMALLER.name, START]
    with tempfile.TemporaryDirectory() as folder:
        found = [measure_model(shape, Path(folder)) for shape in (LARGER, SMALLER) if shape.name in parts]
        starts = [measure_starts(Path(folder))] if START in parts else []
    report(
        "ar_stage",
        [figure for one in found for figure in one.figures()] + starts,
        json_file=arguments.json,
        details=[figure for one in found for figure in one.details()],
    )


if __name__ == "__main__":
    main()
