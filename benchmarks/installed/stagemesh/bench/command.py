"""`stagemesh bench`: runs the loads, prints the report and writes its files."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.bench.command_options import BENCH
from stagemesh.cli.terminal.options import with_parameters
from stagemesh.cli.terminal.tables import Column, make_table, number
from stagemesh.common.errors import ExitCode, InvalidRequestError, needs_extra

if TYPE_CHECKING:
    from rich.progress import Progress
    from rich.table import Table

    from stagemesh.bench.loads import LoadRunner
    from stagemesh.bench.report import LoadReport, Summary


@with_parameters(BENCH)
def bench(**values: Any) -> None:
    """Send load to a running pipeline, or to any server with OpenAI's API, and print latencies, audio continuity,
    throughput and errors. Ctrl-C prints what was measured so far.
    """
    from stagemesh.bench import command_settings
    from stagemesh.bench.loads import LoadRunner

    loads, settings = command_settings.read_loads(values), command_settings.read_settings(values)
    limits = command_settings.read_limits(values["limits"])
    draw = _plotting() if values["plot"] is not None else None
    make_target = command_settings.read_target(values, settings.mix)
    interrupted = False
    with _progress() as progress:
        bar = progress.add_task("warming up", total=None)
        runner: LoadRunner | None = None

        async def run() -> None:
            nonlocal runner
            async with make_target() as target:
                runner = LoadRunner(target, settings, on_result=lambda _: progress.advance(bar))
                await target.check()
                await runner.warm_up(values["warmup"])
                for load in loads:
                    progress.reset(bar, total=settings.requests, description=load.name)
                    await runner.run(load)

        try:
            asyncio.run(run())
        except KeyboardInterrupt:
            interrupted = True
    _show(runner, values, limits=limits, draw=draw)
    if interrupted:
        raise typer.Exit(ExitCode.INTERRUPTED)


def _show(
    runner: "LoadRunner | None",
    values: Mapping[str, Any],
    *,
    limits: Mapping[str, float],
    draw: "Callable[[Path, Sequence[LoadReport]], None] | None",
) -> None:
    """Prints the report of the loads that have run, and writes the files. Does nothing if no request has ended."""
    from stagemesh.bench.report import make_report, to_document
    from stagemesh.cli.terminal.output import print_all

    runs = [] if runner is None else [run for run in runner.runs if run.measurements]
    reports = [make_report(run, limits) for run in runs]
    if not reports:
        return
    json_file = values["json_file"]
    if json_file != "-":
        for report in reports:
            print_all(_to_table(report))
    if json_file is not None:
        document = {
            "target": values["openai"] or values["server"],
            "model": values["model"],
            "seed": values["seed"],
            "arrivals": values["arrivals"] if values["rate"] else None,
            "loads": [to_document(report) for report in reports],
        }
        _write_json(json_file, document)
    if draw is not None:
        draw(values["plot"], reports)


def _write_json(name: str, document: Mapping[str, object]) -> None:
    text = json.dumps(document, ensure_ascii=False, indent=2)
    if name == "-":
        typer.echo(text)
        return
    try:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text + "\n")
    except OSError as exc:
        raise InvalidRequestError(f"--json: cannot write {name}: {exc}", reason="CANNOT_WRITE") from exc


def _progress() -> "Progress":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def _plotting() -> "Callable[[Path, Sequence[LoadReport]], None]":
    """Returns the function that plots. Raises NotReadyError (MISSING_MODULE) before anything is measured."""
    with needs_extra("bench", of="`stagemesh bench`"):
        from stagemesh.bench.plot import write_plot
    return write_plot


# Shorter times are printed in milliseconds, unless they would be rounded to 1,000.0 ms.
_SECOND_S = 0.99995


def _to_table(report: "LoadReport") -> "Table":
    """Returns a table of the figures, with the other results in its title."""
    from stagemesh.bench.measurements import FIGURES

    columns = (
        Column("", lambda row: FIGURES[row[0]].title),
        *(number(name, _report_cell(name)) for name in ("p50", "p90", "p95", "p99", "mean", "max")),
    )
    return make_table(columns, report.figures.items(), title="\n".join(_headlines(report)))


def _report_cell(attribute: str) -> Any:
    from stagemesh.bench.measurements import FIGURES

    def cell(row: "tuple[str, Summary]") -> str:
        value = float(getattr(row[1], attribute))
        return _time_text(value) if FIGURES[row[0]].is_time else f"{value:,.2f}" if value < 10 else f"{value:,.0f}"

    return cell


def _time_text(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < _SECOND_S else f"{seconds:,.2f} s"


def _headlines(report: "LoadReport") -> list[str]:
    failed = sum(report.errors.values())
    rates = report.throughput
    lines = [
        f"{report.load.name}: {report.requests:,} requests in {report.seconds:.1f} s, {failed:,} failed",
        *(f"{count:,} {reason}: {report.error_messages[reason]}" for reason, count in report.errors.items()),
    ]
    lines.append(
        f"{rates.requests_per_s:.2f} requests/s, {rates.tokens_per_s:,.1f} tokens/s, "
        f"{rates.audio_s_per_s:.2f} s of audio/s"
    )
    if report.c50 is not None:
        lines.append(f"C50: {report.c50:.1%} of the streams without an underrun over 50 ms")
    if report.goodput is not None:
        limits = ", ".join(f"{name} <= {limit:g}" for name, limit in report.goodput.limits.items())
        lines.append(f"goodput ({limits}): {report.goodput.share:.1%}, {report.goodput.requests_per_s:.2f} requests/s")
    return lines
