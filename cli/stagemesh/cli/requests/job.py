"""`stagemesh job`: submits jobs to the job server of a running pipeline, and follows them."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.cli.requests.generate import GENERATE, read_prompt
from stagemesh.cli.terminal.connection_options import SERVER, open_client
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Kind, Parameters, argument, command, option, read_pairs
from stagemesh.cli.terminal.output import duration, print_all, print_json, print_result, size
from stagemesh.cli.terminal.tables import Column, make_table, number, state_cell
from stagemesh.common.errors import CancelledRequestError, NotReadyError

if TYPE_CHECKING:
    from stagemesh.client import Client, Job

app = typer.Typer(
    help="Run requests as jobs, which survive restarts of every process, and whose results are stored.",
    no_args_is_help=True,
)

_OF_GENERATE_ALONE = ("output", "audio", "image", "timeout", "wait")
_JOB = argument(Kind.ID, "Name the job by its id.")
_CALLER = option(Kind.NAME, "Set the name of the caller whose jobs are meant. Credentials determine it.", default="")
_COMMON: Parameters = {**SERVER, "caller": _CALLER, **AS_JSON}
_ONE: Parameters = {"job_id": _JOB, **_COMMON}
_SUBMIT: Parameters = {
    **{name: each for name, each in GENERATE.items() if name not in _OF_GENERATE_ALONE},
    "request_id": option(
        Kind.ID,
        "Set the id of the job. A repeated submission with the same id returns the existing job. Random if omitted.",
        "--id",
    ),
    "labels": option(
        list[str], "Store this text with the job, under a name. Repeatable.", "--label", metavar="NAME=TEXT"
    ),
}
_LIST: Parameters = {
    "states": option(
        list[str],
        "List only jobs in this state: queued, running, succeeded, failed or cancelled. Repeatable.",
        "--state",
        metavar="STATE",
    ),
    "limit": option(int, "List at most this number of jobs. 0 lists all.", default=20, min=0),
    **_COMMON,
}
_DOWNLOAD: Parameters = {
    "job_id": _JOB,
    "output": option(Kind.FOLDER, "Write the files to this folder.", default=Path()),
    **_COMMON,
}


@command(app, _SUBMIT)
def submit(**values: Any) -> None:
    """Submit a request as a job, and print its id."""
    content, arguments = read_prompt(values)
    labels = read_pairs(values["labels"], option="--label", convert=str)
    with open_client(values) as client:
        job = client.jobs.submit(content, labels=labels, **arguments)
    print_result(_document(job), job.job_id, as_json=values["as_json"])


@command(app, _ONE)
def get(**values: Any) -> None:
    """Show a job, with its text and the addresses of its files."""
    with open_client(values) as client:
        _show(client.jobs.get(values["job_id"], caller=values["caller"]), as_json=values["as_json"])


@command(app, _LIST, name="list")
def list_jobs(**values: Any) -> None:
    """List the caller's jobs, the newest first."""
    with open_client(values) as client:
        found = client.jobs.list(states=values["states"] or (), caller=values["caller"])
        jobs = list(islice(found, values["limit"] or None))
    if values["as_json"]:
        for job in jobs:
            print_json(_document(job))
    else:
        print_all(_table(jobs))


@command(app, _ONE)
def watch(**values: Any) -> None:
    """Show the progress of a job until it has ended. Fail if the job fails or is cancelled."""
    with open_client(values) as client:
        job = _follow(client, values)
    if values["as_json"]:
        print_json(_document(job))
    if job.error is not None:
        raise job.error
    if job.state == "cancelled":
        raise CancelledRequestError(f"job {job.job_id} was cancelled")
    if not values["as_json"]:
        _show(job, as_json=False)


@command(app, _ONE)
def cancel(**values: Any) -> None:
    """Cancel a job. A running job stops some seconds later."""
    with open_client(values) as client:
        _show(client.jobs.cancel(values["job_id"], caller=values["caller"]), as_json=values["as_json"])


@command(app, _ONE)
def delete(**values: Any) -> None:
    """Stop a job if it runs, and delete the job and its files."""
    with open_client(values) as client:
        client.jobs.delete(values["job_id"], caller=values["caller"])
    document = {"job_id": values["job_id"], "deleted": True}
    print_result(document, f"deleted {values['job_id']}", as_json=values["as_json"])


@command(app, _DOWNLOAD)
def download(**values: Any) -> None:
    """Download the files of a job that has succeeded, named after its outputs."""
    with open_client(values) as client:
        job = client.jobs.get(values["job_id"], caller=values["caller"])
        if job.state != "succeeded":
            raise NotReadyError(
                f"job {job.job_id} is {job.state} and has no files; wait for it (`stagemesh job watch`)"
            )
        paths = client.jobs.download(job, values["output"])
    if values["as_json"]:
        print_json({"job_id": job.job_id, "files": [str(path) for path in paths]})
    for path in () if values["as_json"] else paths:
        typer.echo(f"wrote {path}")


def _follow(client: "Client", values: Mapping[str, Any]) -> "Job":
    """Shows the progress of a job on stderr. Returns the job when it has ended."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

    columns = TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn()
    job: Job | None = None
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as shown:
        task = shown.add_task(values["job_id"], total=None)
        for job in client.jobs.watch(values["job_id"], caller=values["caller"]):
            waits = f", position {job.queue_position}" if job.queue_position else ""
            total = None if job.fraction is None else 1.0
            shown.update(task, description=f"{job.job_id}: {job.state}{waits}", total=total, completed=job.fraction)
    assert job is not None, "the server reports the job at once"
    return job


def _show(job: "Job", *, as_json: bool) -> None:
    if as_json:
        print_json(_document(job))
        return
    print_all(_table([job]))
    if job.error is not None:
        typer.echo(f"{job.error.reason}: {job.error.message}")
    for output in job.outputs:
        if output.text:
            typer.echo(output.text)
        for file in output.files:
            typer.echo(f"{output.name}: {file.uri} ({file.media_type}, {size(file.size_bytes)})")


def _table(jobs: "Sequence[Job]") -> Any:
    now_s = time.time()
    columns = (
        Column("job", lambda job: job.job_id),
        Column("state", lambda job: state_cell(job.state)),
        Column("progress", lambda job: "" if job.fraction is None else f"{job.fraction:.0%}"),
        number("attempts", lambda job: job.attempts),
        number("age", lambda job: duration(max(0.0, now_s - job.created_s))),
        number("expires in", lambda job: "" if job.expires_s is None else duration(max(0.0, job.expires_s - now_s))),
        Column("labels", lambda job: ", ".join(f"{name}={text}" for name, text in sorted(job.labels.items()))),
    )
    return make_table(columns, jobs)


def _document(job: "Job") -> dict[str, Any]:
    """Returns a job as a JSON object."""
    error = job.error
    return {
        **vars(job),
        "fraction": job.fraction,
        "error": None if error is None else {"reason": error.reason, "message": error.message},
        "progress": [asdict(each) for each in job.progress],
        "usage": {name: asdict(usage) for name, usage in job.usage.items()},
        "outputs": [
            {**vars(output), "files": [{**vars(file), "sha256": file.sha256.hex()} for file in output.files]}
            for output in job.outputs
        ],
    }
