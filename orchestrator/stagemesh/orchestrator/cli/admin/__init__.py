"""`stagemesh admin`: builds the commands for operators from the table `COMMANDS`, and runs them."""

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.orchestrator.cli.admin.commands import COMMANDS, GROUPS, Command
from stagemesh.orchestrator.cli.error_output import EXIT_FAILED, AsJson
from stagemesh.orchestrator.cli.options import DEFAULT_ADMIN_SERVER, AdminServer, Parameter, with_parameters
from stagemesh.orchestrator.cli.output import print_all, print_json, to_json

if TYPE_CHECKING:
    from google.protobuf.message import Message

app = typer.Typer(help="Inspect and control a running pipeline.", no_args_is_help=True)


def _callback(command: Command) -> Callable[..., None]:
    def callback(*, server: str, as_json: bool, **values: Any) -> None:
        _run(command, values, server=server, as_json=as_json)

    shared = {"server": Parameter(AdminServer, DEFAULT_ADMIN_SERVER), "as_json": Parameter(AsJson, False)}
    return with_parameters(callback, {**command.parameters, **shared})


def _run(command: Command, values: dict[str, Any], *, server: str, as_json: bool) -> None:
    failed = False
    for answer, replica in _answers(command, values, server=server):
        if as_json:
            print_json({"replica": replica, **to_json(answer)} if replica else to_json(answer))
        else:
            _show(command, answer, values, replica=replica)
        failed = failed or command.fails(answer)
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _answers(command: Command, values: dict[str, Any], *, server: str) -> "Iterator[tuple[Message, str]]":
    """Calls the command's RPC, and yields each answer with the name of the replica that sent the answer.

    The name is empty if AdminService sent the answer.
    """
    from contextlib import closing

    from stagemesh.orchestrator.cli.admin.client import TIMEOUT_S, AdminConnection, is_control, is_stream, make_request

    rpc = command.rpc if isinstance(command.rpc, str) else command.rpc(values)
    timeout_s = values.get("timeout", TIMEOUT_S)
    with AdminConnection(server) as admin:
        for replica in admin.replicas_of(values["target"]) if is_control(rpc) else ("",):
            values["replica"] = replica
            request = make_request(rpc, {**values, **command.fields(values)})
            if is_stream(rpc):
                with closing(admin.stream(rpc, request, timeout_s=timeout_s)) as events:
                    yield from ((event, replica) for event in events)
            else:
                yield admin.call(rpc, request, replica=replica, timeout_s=timeout_s), replica


def _show(command: Command, answer: Any, values: dict[str, Any], *, replica: str) -> None:
    output = command.display(answer, values)
    if isinstance(output, str):
        typer.echo(f"{replica}: {output}" if replica else output)
    else:
        print_all(output)
    if getattr(answer, "next_page_token", ""):
        sys.stderr.write(f"there are more: --page-token {answer.next_page_token}\n")


_groups = {name: typer.Typer(help=text, no_args_is_help=True) for name, text in GROUPS.items()}
for _command in COMMANDS:
    _group, _, _name = _command.name.rpartition(" ")
    _groups.get(_group, app).command(_name, help=_command.description)(_callback(_command))
for _name, _app in _groups.items():
    app.add_typer(_app, name=_name)
