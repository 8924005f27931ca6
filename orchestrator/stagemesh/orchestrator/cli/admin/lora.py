"""`stagemesh admin lora`."""

from typing import Annotated

import typer

from stagemesh.orchestrator.cli.admin.options import DEFAULT_SERVER, PageSize, PageToken, Server, Target, Timeout
from stagemesh.orchestrator.cli.error_output import AsJson

app = typer.Typer(help="LoRA adapters of stages that take them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(metavar="NAME", help="What requests call the adapter.")]
_LONG_S = 300.0


@app.command("load")
def load(
    target: Target,
    name: Name,
    path: Annotated[str, typer.Argument(metavar="FOLDER", help="Where it is on the replica's machine, absolute.")],
    timeout: Timeout = _LONG_S,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
) -> None:
    """Loads an adapter, which requests can name from then on."""
    from stagemesh.orchestrator.cli.admin.replica_calls import call_replicas
    from stagemesh.v1 import control_pb2

    request = control_pb2.LoadAdapterRequest(name=name, path=path)
    call_replicas(
        server,
        target,
        lambda admin, replica: admin.control(admin.controls.LoadAdapter, request, replica=replica, timeout_s=timeout),
        describe=lambda answer: f"loaded {answer.adapter.name}, rank {answer.adapter.rank}",
        as_json=as_json,
    )


@app.command("unload")
def unload(
    target: Target,
    name: Name,
    drain: Annotated[bool, typer.Option("--drain", help="Wait for requests that use it.")] = False,
    timeout: Timeout = _LONG_S,
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
) -> None:
    """Forgets an adapter."""
    from stagemesh.orchestrator.cli.admin.replica_calls import call_replicas
    from stagemesh.v1 import control_pb2

    policy = control_pb2.BUSY_POLICY_DRAIN if drain else control_pb2.BUSY_POLICY_REFUSE
    request = control_pb2.UnloadAdapterRequest(name=name, when_busy=policy)
    call_replicas(
        server,
        target,
        lambda admin, replica: admin.control(admin.controls.UnloadAdapter, request, replica=replica, timeout_s=timeout),
        describe=lambda _: f"unloaded {name}",
        as_json=as_json,
    )


@app.command("pin")
def pin(target: Target, name: Name, server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """Keeps an adapter in a slot of the engine, so that no request waits for it."""
    from stagemesh.orchestrator.cli.admin.replica_calls import call_replicas
    from stagemesh.v1 import control_pb2

    request = control_pb2.PinAdapterRequest(name=name)
    call_replicas(
        server,
        target,
        lambda admin, replica: admin.control(admin.controls.PinAdapter, request, replica=replica),
        describe=lambda answer: f"pinned {answer.adapter.name}",
        as_json=as_json,
    )


@app.command("list")
def list_adapters(
    target: Target,
    server: Server = DEFAULT_SERVER,
    page_size: PageSize = 0,
    page_token: PageToken = "",
    as_json: AsJson = False,
) -> None:
    """Shows the adapters of a replica, or of each of a stage's."""
    from stagemesh.orchestrator.cli.admin.replica_calls import call_replicas
    from stagemesh.v1 import control_pb2

    def describe(answer: control_pb2.ListAdaptersResponse) -> str:
        lines = [
            f"\n  {each.name}  rank {each.rank}{', pinned' if each.pinned else ''}, {each.running} running  {each.path}"
            for each in answer.adapters
        ]
        more = f"\n  there is more: --page-token {answer.next_page_token}" if answer.next_page_token else ""
        return f"{len(answer.adapters)} adapters{''.join(lines)}{more}"

    request = control_pb2.ListAdaptersRequest(page_size=page_size, page_token=page_token)
    call_replicas(
        server,
        target,
        lambda admin, replica: admin.control(admin.controls.ListAdapters, request, replica=replica),
        describe=describe,
        as_json=as_json,
    )
