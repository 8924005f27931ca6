"""The autoregressive stage: tokens through its gRPC service against AsyncLLM called directly, with the same arguments.

Both ways are up at once and take turns; a ratio is the median over the repeats of the ratio within a repeat. A
stream is one request after the other, of 32 prompt and 64 output tokens; every engine step's token is a message of its
own. The stage, the engine called directly and the client are processes of their own, as are the engines' cores.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.ar_ways.client import StageClient
from benchmarks.ar_ways.direct import MODEL, DirectEngine
from benchmarks.ar_ways.memory import tree_mb
from benchmarks.ar_ways.models import LARGER, SMALLER, Shape, write_model
from benchmarks.ar_ways.probed_stage import Stalls
from benchmarks.ar_ways.staged import StagedEngine
from benchmarks.ar_ways.workload import Outcome
from benchmarks.edge_ways.findings import say
from benchmarks.edge_ways.worker import Place, Worker
from benchmarks.report import Figure, report

STREAMS = (1, 8, 32)
REQUESTS: Mapping[str, Mapping[int, int]] = {LARGER.name: {1: 3, 8: 3, 32: 2}, SMALLER.name: {1: 6, 8: 6, 32: 6}}
"""Requests of a stream in a turn: about a second's worth."""
GOALS: Mapping[str, str] = {LARGER.name: ">=0.95", SMALLER.name: ">=0.75"}
STARTS = 3
PROBED_TURNS = 5

HIDDEN_STATES = f"{LARGER.name}: tokens with hidden states over shm, stage / direct"


@dataclass
class Findings:
    """What was seen of one model."""

    shape: Shape
    turns: dict[int, list[tuple[Outcome, Outcome]]] = field(default_factory=dict[int, list[tuple[Outcome, Outcome]]])
    """By the number of streams: the stage's, and the direct engine's."""
    memory_mb: tuple[float, float] = (0.0, 0.0)
    stalls: Stalls | None = None

    def figures(self) -> list[Figure]:
        """The ratios."""
        subject = f"{self.shape.name} parameters"
        speeds = [
            Figure(
                f"tokens, stage / direct, {streams} streams",
                statistics.median(ours.tokens_per_s / direct.tokens_per_s for ours, direct in turns),
                "ratio",
                GOALS[self.shape.name],
                subject,
            )
            for streams, turns in self.turns.items()
        ]
        ours_mb, direct_mb = self.memory_mb
        return [
            *speeds,
            Figure("memory, stage over direct", ours_mb - direct_mb, "MB", "<=60", subject),
            *self._stall_figures(subject),
        ]

    def details(self) -> list[Figure]:
        """The speeds themselves."""
        found: list[Figure] = []
        for streams, turns in self.turns.items():
            for place, way in enumerate(("stage", "direct")):
                subject = f"{self.shape.name} parameters, {streams} streams, {way}"
                outcomes = [turn[place] for turn in turns]
                found.append(
                    Figure("tokens", statistics.median(one.tokens_per_s for one in outcomes), "1/s", "", subject)
                )
                messages = statistics.median(one.messages / one.tokens for one in outcomes)
                found.append(Figure("messages a token", messages, "", "", subject))
        return found

    def _stall_figures(self, subject: str) -> list[Figure]:
        stalls = self.stalls
        if stalls is None:
            return []
        return [
            Figure("event loop late at most, 32 streams", stalls.max_ms, "ms", "<=20", subject),
            Figure("event loop late, 99.9th percentile", stalls.p999_ms, "ms", "", subject),
            Figure("event loop's longest work", stalls.max_work_ms, "ms", "", subject),
        ]


def measure_model(shape: Shape, folder: Path, *, repeats: int) -> Findings:
    """Both ways, with 1, 8 and 32 streams."""
    findings = Findings(shape)
    model = write_model(folder / shape.name, shape)
    with ExitStack() as stack:
        direct = _direct(stack, model)
        staged = stack.enter_context(StagedEngine(folder, model=model, name=shape.name))
        client = Worker(StageClient, (), Place())
        stack.callback(client.close)
        client.ready()
        client.call(StageClient.connect, staged.endpoint)
        for turn in range(repeats + 1):
            for streams in STREAMS:
                requests = REQUESTS[shape.name][streams]
                ways = [
                    lambda: client.call(StageClient.run, streams=streams, requests=requests, turn=turn),  # noqa: B023
                    lambda: direct.call(DirectEngine.run, streams=streams, requests=requests, turn=turn),  # noqa: B023
                ]
                # Who comes first changes from turn to turn; the turn 0 warms up.
                first = turn % 2
                results = {place: ways[place]() for place in (first, 1 - first)}
                if turn:
                    findings.turns.setdefault(streams, []).append((results[0], results[1]))
            say(f"{shape.name}: turn {turn} of {repeats}")
        findings.memory_mb = (tree_mb(staged.process_id), tree_mb(direct.call(DirectEngine.process_id)))
        staged.begin_probe()
        for turn in range(PROBED_TURNS):
            client.call(
                StageClient.run,
                streams=STREAMS[-1],
                requests=REQUESTS[shape.name][STREAMS[-1]],
                turn=repeats + 1 + turn,
            )
        findings.stalls = staged.end_probe()
    return findings


def measure_starts(folder: Path) -> Figure:
    """From a process's start until its engine answers, and until its stage is READY."""
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


def _direct(stack: ExitStack, model: Path) -> Worker[DirectEngine]:
    place = Place(environment={MODEL: str(model), "VLLM_LOGGING_LEVEL": "ERROR"})
    direct = Worker(DirectEngine, (), place, starts_processes=True)
    stack.callback(direct.close)
    direct.ready()
    return direct


def main() -> None:
    """Reads the command line, measures, reports."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", choices=[SMALLER.name, LARGER.name, "start"], help="measure a part")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [
            measure_model(shape, Path(folder), repeats=arguments.repeats)
            for shape in (LARGER, SMALLER)
            if arguments.only in (None, shape.name)
        ]
        starts = [measure_starts(Path(folder))] if arguments.only in (None, "start") else []
    report(
        "ar_stage",
        [figure for one in found for figure in one.figures()] + starts,
        json_file=arguments.json,
        details=[figure for one in found for figure in one.details()],
        left_out={HIDDEN_STATES: "the stage does not emit them yet"},
    )


if __name__ == "__main__":
    main()
