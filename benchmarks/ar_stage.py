"""Measures the autoregressive stage against AsyncLLM called directly with the same arguments.

All variants are up at once, and their trials alternate. A ratio is the median over the repeats of the ratio within a
repeat. The tokens of each engine step form a message of their own. In the variant with hidden states, the rows of every
token also go to another process. The stage, the directly called engine, the client and the consumer of hidden states
are separate processes, as are the engines' cores. A stall of the stage's event loop is the delay of a timer, minus the
time in which other processes used the processors, and minus the time in which idle loops, one on each processor, were
delayed too.
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

from benchmarks.ar_variants.client import StageClient
from benchmarks.ar_variants.direct_engine import MODEL, DirectEngine
from benchmarks.ar_variants.loop_probe import IdleLoop, Stalls, stalls
from benchmarks.ar_variants.model_files import LARGER, SMALLER, Shape, write_model
from benchmarks.ar_variants.processes import own_mb, started_mb
from benchmarks.ar_variants.staged_engine import ARENA_BYTES, EMITS_STATES, StagedEngine
from benchmarks.ar_variants.states_consumer import StatesConsumer
from benchmarks.ar_variants.trials import Times, Variant, run_trials
from benchmarks.ar_variants.workload import Outcome, Trial
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
"""The goals of each model's variants, as ratios to the direct variant."""
FRONT_END_GOALS = {STAGE: "<=1.91", STATES: "<=2.94"}
"""The goals of the processor time of the front end, as ratios to that of the direct variant: 65 and 100 to 34 µs."""
START = "start"
STARTS = 3
PROBED_S = 8.0


@dataclass
class ModelResults:
    """The measurements of one model."""

    shape: Shape
    times: dict[int, Times] = field(default_factory=dict[int, Times])
    """The trials' results by the number of streams."""
    memory_mb: dict[str, float] = field(default_factory=dict[str, float])
    """The front end's memory after all trials, plus that of the engine's processes after the trials with one stream.

    An engine keeps about a megabyte for each batch size that it has met. With several streams these sizes vary at
    random.
    """
    all_memory_mb: dict[str, float] = field(default_factory=dict[str, float])
    """The memory of the front end and of the engine's processes after all trials."""
    stalls: dict[str, Stalls] = field(default_factory=dict[str, Stalls])

    def figures(self) -> list[Figure]:
        """Returns the figures that have a goal."""
        subject = f"{self.shape.name} parameters"
        figures = [
            Figure(
                f"tokens, {variant} / direct, {_text(streams)}", times.ratio(variant, DIRECT), "ratio", goal, subject
            )
            for variant, goal in GOALS[self.shape.name].items()
            for streams, times in self.times.items()
        ]
        figures += [
            Figure(
                f"processor time of the front end a token, {variant} / direct, {_text(STREAMS[-1])}",
                self.times[STREAMS[-1]].front_end_ratio(variant, DIRECT),
                "ratio",
                FRONT_END_GOALS[variant],
                subject,
            )
            for variant in GOALS[self.shape.name]
        ]
        more_mb = self.memory_mb[STAGE] - self.memory_mb[DIRECT]
        figures.append(
            Figure(f"memory, stage with {ARENA_BYTES >> 20} MiB arena over direct", more_mb, "MB", "<=60", subject)
        )
        for variant, seen in self.stalls.items():
            what = f"event loop, {variant}, {_text(STREAMS[-1])}"
            figures.append(Figure(f"{what}: stalled at most", seen.stalled_ms, "ms", "<=20", subject))
            figures.append(Figure(f"{what}: late at most", seen.late_ms, "ms", "", subject))
            figures.append(Figure(f"{what}: late at most, idle loops", seen.idle_ms, "ms", "", subject))
            figures.append(Figure(f"{what}: longest work of its own", seen.worked_ms, "ms", "", subject))
        return figures

    def details(self) -> list[Figure]:
        """Returns the measurements behind the figures."""
        subject = f"{self.shape.name} parameters"
        figures = [
            Figure(f"memory after batches of all sizes, {variant}", memory_mb, "MB", "", subject)
            for variant, memory_mb in self.all_memory_mb.items()
        ]
        for streams, times in self.times.items():
            for unit, name, values in (
                ("1/s", "tokens", times.tokens_per_s),
                ("µs", "processor time of the front end, a token", times.front_end_us),
                ("", "messages, a token", times.messages),
            ):
                subject = f"{self.shape.name} parameters, {_text(streams)}"
                figures.extend(
                    Figure(f"{name}, {variant}", statistics.median(values[variant]), unit, "", subject)
                    for variant in values
                )
        return figures


def measure_model(shape: Shape, folder: Path) -> ModelResults:
    """Measures all variants of one model."""
    findings = ModelResults(shape)
    model = write_model(folder / shape.name, shape)
    with ExitStack() as stack:
        direct = _direct(stack, model)
        options = EMITS_STATES if STATES in GOALS[shape.name] else dict[str, JsonValue]()
        staged = stack.enter_context(StagedEngine(folder, model=model, name=shape.name, options=options))
        variants = _variants(stack, direct, staged, wanted=GOALS[shape.name])
        say(f"{shape.name}: {', '.join(variants)} are up")
        front_ends = {name: variants[name].front_end for name in (STAGE, DIRECT)}
        engines_mb = dict[str, float]()
        for streams in STREAMS:
            findings.times[streams] = run_trials(list(variants.values()), streams=streams, name=f"trial-{streams}")
            say(f"{shape.name}: {_text(streams)}")
            engines_mb = engines_mb or {name: started_mb(process) for name, process in front_ends.items()}
        findings.memory_mb = {name: own_mb(process) + engines_mb[name] for name, process in front_ends.items()}
        findings.all_memory_mb = {name: own_mb(process) + started_mb(process) for name, process in front_ends.items()}
        for name in GOALS[shape.name]:
            findings.stalls[name] = _probed(staged, variants[name])
            say(f"{shape.name}: event loop, {name}")
    return findings


def measure_starts(folder: Path) -> Figure:
    """Measures the time from a process's start until the direct engine answers, and until the stage is READY."""
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


def _variants(
    stack: ExitStack, direct: Worker[DirectEngine], staged: StagedEngine, *, wanted: Mapping[str, str]
) -> dict[str, Variant]:
    client = _entered(stack, Worker(StageClient, (), Place()))
    client.call(StageClient.connect, staged.endpoint)
    variants = {
        STAGE: Variant(STAGE, staged.process_id, lambda trial: client.call(StageClient.run, trial, None)),
        DIRECT: Variant(
            DIRECT, direct.call(DirectEngine.process_id), lambda trial: direct.call(DirectEngine.run, trial)
        ),
    }
    if STATES in wanted:
        consumer = _entered(stack, Worker(StatesConsumer, (), Place()))
        variants[STATES] = Variant(STATES, staged.process_id, partial(_with_states, client, consumer))
    return variants


def _with_states(client: Worker[StageClient], consumer: Worker[StatesConsumer], trial: Trial) -> Outcome:
    trial = replace(trial, name=f"{trial.name}-states")
    consumer.call(StatesConsumer.begin, trial)
    outcome = client.call(StageClient.run, trial, consumer.call(StatesConsumer.address))
    consumer.call(StatesConsumer.end)
    return outcome


def _probed(staged: StagedEngine, variant: Variant) -> Stalls:
    """Probes the stage's event loop and idle loops, one on each processor, while the variant runs."""
    with ExitStack() as stack:
        processors = sorted(os.sched_getaffinity(0))
        idle = {processor: _entered(stack, Worker(IdleLoop, (), Place())) for processor in processors}
        for processor, loop in idle.items():
            loop.call(IdleLoop.begin, processor)
        staged.begin_probe()
        end_s = time.monotonic() + PROBED_S
        for number in itertools.count():
            variant.run(Trial(f"probed-{number}", STREAMS[-1]))
            if time.monotonic() > end_s:
                break
        ticks = staged.end_probe()
        return stalls(ticks, [tick for loop in idle.values() for tick in loop.call(IdleLoop.end)])


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
    # Inherited by the processes that this one starts.
    os.environ |= {"GRPC_VERBOSITY": "ERROR", "PYTHONWARNINGS": "ignore"}
    parser = argparse.ArgumentParser(description="Measure the autoregressive stage against AsyncLLM called directly.")
    parser.add_argument("--json", type=Path, help="Write the figures to this file as JSON.")
    parser.add_argument(
        "--only",
        choices=[SMALLER.name, LARGER.name, START],
        help="Measure only this model, or only the time to start; measure everything if omitted.",
    )
    arguments = parser.parse_args()
    parts = [arguments.only] if arguments.only else [LARGER.name, SMALLER.name, START]
    with tempfile.TemporaryDirectory() as folder:
        results = [measure_model(shape, Path(folder)) for shape in (LARGER, SMALLER) if shape.name in parts]
        starts = [measure_starts(Path(folder))] if START in parts else []
    report(
        "ar_stage",
        [figure for model in results for figure in model.figures()] + starts,
        json_file=arguments.json,
        details=[figure for model in results for figure in model.details()],
    )


if __name__ == "__main__":
    main()
