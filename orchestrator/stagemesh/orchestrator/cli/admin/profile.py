"""`stagemesh admin profile`."""

from typing import Annotated

import typer

from stagemesh.orchestrator.cli.admin.options import DEFAULT_SERVER, Server, Target, Timeout
from stagemesh.orchestrator.cli.error_output import AsJson

app = typer.Typer(help="Recordings of what engines compute.", no_args_is_help=True)


@app.command("start")
def start(
    target: Target,
    folder: Annotated[
        str, typer.Option(metavar="FOLDER", help="Where the files go, within the stage's profile_dir.")
    ] = "profile",
    steps: Annotated[int | None, typer.Option(min=1, help="End by itself after so many engine steps.")] = None,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
) -> None:
    """Begins a recording."""
    from stagemesh.orchestrator.cli.admin.replica_calls import call_replicas
    from stagemesh.v1 import control_pb2

    call_replicas(
        server,
        target,
        lambda admin, replica: admin.control(
            admin.controls.StartProfile,
            control_pb2.StartProfileRequest(folder=f"{folder}/{replica}", max_steps=steps),
            replica=replica,
        ),
        describe=lambda answer: f"records into {answer.folder}",
        as_json=as_json,
    )


@app.command("stop")
def stop(target: Target, timeout: Timeout = 300.0, server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """Ends a recording, and says where its files are."""
    from stagemesh.orchestrator.cli.admin.replica_calls import call_replicas
    from stagemesh.v1 import control_pb2

    call_replicas(
        server,
        target,
        lambda admin, replica: admin.control(
            admin.controls.StopProfile, control_pb2.StopProfileRequest(), replica=replica, timeout_s=timeout
        ),
        describe=lambda answer: "".join(f"\n  {file}" for file in answer.files) or "no files",
        as_json=as_json,
    )
