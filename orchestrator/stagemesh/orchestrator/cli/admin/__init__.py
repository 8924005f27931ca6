"""`stagemesh admin`: builds the commands for operators from the table `COMMANDS`, and runs them."""

import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.common.exit_codes import ExitCode
from stagemesh.orchestrator.cli.admin import wait
from stagemesh.orchestrator.cli.admin.commands import COMMANDS, GROUPS, Command
from stagemesh.orchestrator.cli.contexts.addresses import ADMIN_SERVER
from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import Parameter, with_parameters
from stagemesh.orchestrator.cli.output import print_all, print_json, to_json
from stagemesh.orchestrator.cli.watching import show_views, ticks

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import RenderableType

    from stagemesh.orchestrator.cli.admin.client import AdminConnection

app = typer.Typer(help="Inspect and control a running pipeline.", no_args_is_help=True)


def _callback(command: Command) -> Callable[..., None]:
    def callback(*, admin_server: str, as_json: bool, **values: Any) -> None:
        from stagemesh.orchestrator.cli.admin.client import AdminConnection

        with AdminConnection(admin_server) as admin:
            _run(admin, command, values, as_json=as_json)

    return with_parameters(callback, {**command.parameters, **ADMIN_SERVER, "as_json": Parameter(AsJson, False)})


def _run(admin: "AdminConnection", command: Command, values: dict[str, Any], *, as_json: bool) -> None:
    watch = values.get("watch", False)
    updates = (_answers(admin, command, values) for _ in ticks(interval_s=values.get("interval", 0.0), watch=watch))
    if watch and not as_json:
        show_views(_view(command, answers, values) for answers in updates)
        return
    failed = False
    for answer, replica in (each for answers in updates for each in answers):
        if as_json:
            print_json({"replica": replica, **to_json(answer)} if replica else to_json(answer))
        else:
            _show(command, answer, values, replica=replica)
        failed = failed or command.fails(answer)
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def _answers(admin: "AdminConnection", command: Command, values: dict[str, Any]) -> "Iterator[tuple[Message, str]]":
    """Calls the command's RPC, and yields each answer with the name of the replica that sent the answer.

    The name is empty if AdminService sent the answer.
    """
    from contextlib import closing

    from stagemesh.orchestrator.cli.admin.client import TIMEOUT_S, is_control, is_stream, make_request

    rpc = command.rpc if isinstance(command.rpc, str) else command.rpc(values)
    timeout_s = values.get("timeout", TIMEOUT_S)
    call = admin.call_all_pages if values.get("all_pages") else admin.call
    for replica in admin.replicas_of(values["target"]) if is_control(rpc) else ("",):
        values["replica"] = replica
        request = make_request(rpc, {**values, **command.fields(values)})
        if is_stream(rpc):
            with closing(admin.stream(rpc, request, timeout_s=timeout_s)) as events:
                yield from ((event, replica) for event in events)
        else:
            yield call(rpc, request, replica=replica, timeout_s=timeout_s), replica


def _view(command: Command, answers: "Iterator[tuple[Message, str]]", values: dict[str, Any]) -> "RenderableType":
    from rich.console import Group

    return Group(*(part for answer, replica in answers for part in _parts(command, answer, values, replica=replica)))


def _parts(command: Command, answer: Any, values: dict[str, Any], *, replica: str) -> "Iterator[RenderableType]":
    """Yields what is displayed for an answer, with the name of the replica that sent it, unless the name is empty."""
    output = command.display(answer, values)
    if isinstance(output, str):
        yield f"{replica}: {output}" if replica else output
    else:
        yield output


def _show(command: Command, answer: Any, values: dict[str, Any], *, replica: str) -> None:
    for part in _parts(command, answer, values, replica=replica):
        typer.echo(part) if isinstance(part, str) else print_all(part)
    if getattr(answer, "next_page_token", ""):
        sys.stderr.write(f"there are more: --page-token {answer.next_page_token}, or --all\n")


_groups = {name: typer.Typer(help=text, no_args_is_help=True) for name, text in GROUPS.items()}
for _command in COMMANDS:
    _group, _, _name = _command.name.rpartition(" ")
    _groups.get(_group, app).command(_name, help=_command.description)(_callback(_command))
for _name, _app in _groups.items():
    app.add_typer(_app, name=_name)
app.command("wait")(with_parameters(wait.wait, wait.PARAMETERS))
