"""Measures sessions: the memory of idle ones, the delay that they add to others, and the times of spoken turns.

    python -m benchmarks.sessions --json out/sessions.json

The orchestrator is the real service in its own process. Each idle session has had a turn. A session with an open call
needs at least the memory of a gRPC stream, which a minimal server shows. A parked session has no call. Requests of
another client run without idle sessions, with sessions that have open calls, and with parked ones, in alternation.

The pipeline `speech` answers the same prompt in a session and by `Generate`, in alternation. It also speaks a text that
is appended token by token, and is interrupted at random moments.
"""

import argparse
import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.report import Figure, report
from benchmarks.session_parts.idle import Delays, Memory, measure_delays, measure_memory
from benchmarks.session_parts.spoken import (
    FirstAudio,
    measure_first_audio,
    measure_interruptions,
    measure_streamed_text,
)
from stagemesh.cli.launcher import Launcher
from stagemesh.client import AsyncClient
from stagemesh.pipeline import load_pipeline

_KB = 1000
_MS = 1000


async def measure_speech(repeats: int, interruptions: int) -> tuple[list[FirstAudio], list[float], list[float]]:
    """Runs the pipeline `speech`. Returns the times to the first audio, after sentences, and to silence."""
    launcher = Launcher(load_pipeline("speech"), listen="127.0.0.1:0")
    async with launcher.running():
        await launcher.wait_ready()
        async with AsyncClient(launcher.endpoint) as client:
            return (
                await measure_first_audio(client, repeats=repeats),
                await measure_streamed_text(client, repeats=repeats),
                await measure_interruptions(client, count=interruptions),
            )


def idle_figures(count: int, memory: Memory, delays: Sequence[Delays]) -> list[Figure]:
    """Returns the figures of idle sessions."""
    subject, median = f"{count} idle sessions", statistics.median
    return [
        Figure("orchestrator memory, parked session", memory.parked_bytes / _KB, "KB", "<=20", subject),
        Figure("orchestrator memory, session with an open call", memory.open_bytes / _KB, "KB", "", subject),
        Figure("memory of a minimal gRPC stream", memory.stream_bytes / _KB, "KB", "", subject),
        Figure("requests in flight", max(each.in_flight for each in delays), "requests", "<=0", subject),
        Figure(
            "p99 of other requests, open calls / no session",
            median(each.open_s / each.alone_s for each in delays),
            "ratio",
            "<=1.1",
            subject,
        ),
        Figure(
            "p99 of other requests, parked sessions / no session",
            median(each.parked_s / each.alone_s for each in delays),
            "ratio",
            "<=1.1",
            subject,
        ),
        Figure("p99 of other requests, no session", _MS * median(each.alone_s for each in delays), "ms", "", subject),
    ]


def speech_figures(
    first: Sequence[FirstAudio], streamed_s: Sequence[float], silence_s: Sequence[float]
) -> list[Figure]:
    """Returns the figures of the pipeline `speech`."""
    subject, median = "speech", statistics.median
    return [
        Figure(
            "first audio, commit / Generate",
            median(each.session_s / each.generate_s for each in first),
            "ratio",
            "<=1.1",
            subject,
        ),
        Figure("first audio after commit", median(each.session_s for each in first), "s", "", subject),
        Figure("first audio of Generate", median(each.generate_s for each in first), "s", "", subject),
        Figure("first audio after the first sentence, most", max(streamed_s), "s", "<=0.3", subject),
        Figure("first audio after the first sentence, median", median(streamed_s), "s", "", subject),
        Figure("interrupt to silence, p99", _MS * statistics.quantiles(silence_s, n=100)[98], "ms", "<=50", subject),
        Figure("interrupt to silence, median", _MS * median(silence_s), "ms", "", subject),
    ]


def main() -> None:
    """Reads the command line, measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the figures to this file.")
    parser.add_argument("--sessions", type=int, default=500, help="Hold this number of idle sessions.")
    parser.add_argument("--rounds", type=int, default=3, help="Measure requests in this number of rounds.")
    parser.add_argument("--repeats", type=int, default=9, help="Measure the first audio this number of times.")
    parser.add_argument("--interruptions", type=int, default=200, help="Interrupt this number of answers.")
    parser.add_argument("--only", choices=["idle", "speech"], help="Measure only this part; both if omitted.")
    arguments = parser.parse_args()
    figures: list[Figure] = []
    if arguments.only != "speech":
        memory = asyncio.run(measure_memory(arguments.sessions))
        delays = asyncio.run(measure_delays(arguments.sessions, rounds=arguments.rounds))
        figures += idle_figures(arguments.sessions, memory, delays)
    if arguments.only != "idle":
        figures += speech_figures(*asyncio.run(measure_speech(arguments.repeats, arguments.interruptions)))
    report("sessions", figures, json_file=arguments.json)


if __name__ == "__main__":
    main()
