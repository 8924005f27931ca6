"""`stagemesh admin drain`, `resume`, `restart`."""

from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.orchestrator.cli.admin.options import DEFAULT_SERVER, Server, Target, Timeout
from stagemesh.orchestrator.cli.error_output import AsJson

if TYPE_CHECKING:
    from stagemesh.v1 import admin_pb2

_LONG_S = 600.0


def drain(
    target: Target,
    wait: Annotated[bool, typer.Option("--wait", help="Return only when nothing runs there any more.")] = False,
    move: Annotated[bool, typer.Option("--move", help="Have what runs go on on other replicas.")] = False,
    grace_s: Annotated[
        float, typer.Option("--grace", min=0, metavar="SECONDS", help="With --move: what is done by then stays.")
    ] = 0,
    force: Annotated[bool, typer.Option("--force", help="Also where no ready replica is left.")] = False,
    timeout: Timeout = _LONG_S,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
) -> None:
    """Plans nothing new on a replica or a stage; what runs there finishes, or goes on elsewhere."""
    from stagemesh.orchestrator.cli.admin.client import connected
    from stagemesh.orchestrator.cli.admin.output import show_page
    from stagemesh.orchestrator.cli.admin.tables import replicas_states
    from stagemesh.v1 import admin_pb2

    with connected(server) as admin:
        move_after_s = grace_s if move else None
        request = admin_pb2.DrainReplicasRequest(target=target, wait=wait, force=force, move_after_s=move_after_s)
        answer = admin.call(admin.admin.DrainReplicas, request, timeout_s=timeout)
    show_page(answer, replicas_states(answer.replicas), as_json=as_json, next_token="")


def resume(target: Target, server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """Ends a drain: new requests are planned there again."""
    from stagemesh.orchestrator.cli.admin.client import connected
    from stagemesh.orchestrator.cli.admin.output import show_page
    from stagemesh.orchestrator.cli.admin.tables import replicas_states
    from stagemesh.v1 import admin_pb2

    with connected(server) as admin:
        answer = admin.call(admin.admin.ResumeReplicas, admin_pb2.ResumeReplicasRequest(target=target))
    show_page(answer, replicas_states(answer.replicas), as_json=as_json, next_token="")


def restart(
    target: Target,
    drain_s: Annotated[
        float, typer.Option("--drain", min=0, metavar="SECONDS", help="How long what runs may take; 0 is 300.")
    ] = 0,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Also where no ready replica is left meanwhile, and where requests run still after --drain."
        ),
    ] = False,
    timeout: Timeout = 3600.0,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
) -> None:
    """Restarts a replica, or a stage's one after the other: drained, ended, started again by its supervisor, ready."""
    from contextlib import closing

    from stagemesh.orchestrator.cli.admin.client import connected
    from stagemesh.orchestrator.cli.admin.output import show_json
    from stagemesh.v1 import admin_pb2

    request = admin_pb2.RestartReplicasRequest(target=target, force=force, drain_s=drain_s)
    with connected(server) as admin:
        events = admin.stream(admin.admin.RestartReplicas, request, timeout_s=timeout)
        with closing(events):
            for event in events:
                if as_json:
                    show_json(event)
                else:
                    _show(event)


def _show(event: "admin_pb2.RestartReplicasResponse") -> None:
    from stagemesh.orchestrator.cli.admin.json_output import word_of
    from stagemesh.v1 import admin_pb2

    word = word_of(admin_pb2.DESCRIPTOR.enum_types_by_name["RestartPhase"], event.phase)
    running = f", {event.running} requests run still" if event.running else ""
    typer.echo(f"{event.replica}: {word}{running}")
