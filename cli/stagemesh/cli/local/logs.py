"""`stagemesh logs`: shows the logs of the processes that `stagemesh up` and `stagemesh demo` have started."""

import sys
from collections import deque
from collections.abc import Iterable
from operator import itemgetter
from typing import TYPE_CHECKING, Any

from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Parameters, argument, flag, option, with_parameters
from stagemesh.cli.terminal.output import print_result
from stagemesh.cli.terminal.tables import Column, make_table
from stagemesh.common.process import settings

if TYPE_CHECKING:
    from stagemesh.cli.launcher.run_folder import LogLine, PastRun

_LOGS: Parameters = {
    "name": argument(str | None, "Show only the logs of this stage or process.", default=None, metavar="STAGE|PROCESS"),
    "run": option(
        str,
        "Show this run, by default the newest in progress. The first characters of its name are enough.",
        metavar="RUN",
    ),
    "follow": option(bool, "Wait for further lines until the run ends.", "--follow", "-f", default=False),
    "lines": option(int, "Show only this number of lines, the last ones.", "-n", "--lines", min=0, metavar="NUMBER"),
    "runs": flag("List the runs whose logs are kept: those of the last 7 days, at most 200 runs and 1 GiB.", "--list"),
    **AS_JSON,
}


@with_parameters(_LOGS)
def logs(**values: Any) -> None:
    """Show the logs of a run of `stagemesh up` or `stagemesh demo` on this machine, merged by time."""
    from stagemesh.cli.launcher.run_folder import RunLogs, find_run, past_runs

    if values["runs"]:
        _show_runs(past_runs(settings.runs_dir()), as_json=values["as_json"])
        return
    run = find_run(settings.runs_dir(), values["run"])
    sys.stderr.write(f"run {run.name} in {run.path}\n")
    found = RunLogs(run, name=values["name"])
    lines: Iterable[LogLine] = found.read()
    if values["lines"] is not None:
        lines = deque(lines, maxlen=values["lines"])
    _show(lines, as_json=values["as_json"])
    if values["follow"]:
        _show(found.follow(), as_json=values["as_json"])


def _show(lines: "Iterable[LogLine]", *, as_json: bool) -> None:
    for line in lines:
        document = {"process": line.process, "text": line.text}
        print_result(document, f"{line.process}: {line.text}", as_json=as_json)
        sys.stdout.flush()


def _show_runs(runs: "Iterable[PastRun]", *, as_json: bool) -> None:
    rows = [
        {
            "run": run.name,
            "pipeline": run.pipeline,
            "state": "ended" if run.is_over else "running",
            "size_bytes": run.size_bytes,
            "folder": str(run.path),
        }
        for run in runs
    ]
    columns = [Column(name, itemgetter(name)) for name in ("run", "pipeline", "state", "folder")]
    print_result(rows, make_table(columns, rows), as_json=as_json)
