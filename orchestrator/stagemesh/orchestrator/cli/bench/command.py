"""The command `stagemesh bench`: runs the loads, prints the report and writes its files."""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.exit_codes import ExitCode
from stagemesh.common.extras import needs_extra

if TYPE_CHECKING:
    from rich.progress import Progress

    from stagemesh.orchestrator.cli.bench.loads import LoadRunner
    from stagemesh.orchestrator.cli.bench.report import LoadReport


def bench(**values: Any) -> None:
    """Send load to a running pipeline, or to any server with OpenAI's API, and print latencies, audio continuity,
    throughput and errors. Ctrl-C prints what was measured so far.
    """
    from stagemesh.orchestrator.cli.bench import command_line
    from stagemesh.orchestrator.cli.bench.loads import LoadRunner

    loads, settings = command_line.read_loads(values), command_line.read_settings(values)
    limits = command_line.read_limits(values["limits"])
    draw = _plotting() if values["plot"] is not None else None
    make_target = command_line.read_target(values, settings.mix)
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
    from stagemesh.orchestrator.cli.bench.report import make_report, to_document, to_table
    from stagemesh.orchestrator.cli.output import print_all

    runs = [] if runner is None else [run for run in runner.runs if run.measurements]
    reports = [make_report(run, limits) for run in runs]
    if not reports:
        return
    json_file = values["json_file"]
    if json_file != "-":
        for report in reports:
            print_all(to_table(report))
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
        from stagemesh.orchestrator.cli.bench.plot import write_plot
    return write_plot
