"""`stagemesh admin`: builds its commands from the table `COMMANDS`, and runs them."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.cli.operation.admin_commands import COMMANDS, GROUPS, Command
from stagemesh.cli.operation.admin_targets import complete_target
from stagemesh.cli.terminal.connection_options import ADMIN_SERVER
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Kind, Parameters, argument, option, with_parameters
from stagemesh.cli.terminal.output import print_result, show_views, ticks, to_json
from stagemesh.common.errors import DeadlineError, ExitCode, NotFoundError, UnavailableError
from stagemesh.common.wire.encoding import enum_word

if TYPE_CHECKING:
    from google.protobuf.message import Message
    from rich.console import RenderableType

    from stagemesh.cli.operation.admin_connection import AdminConnection
    from stagemesh.v1 import admin_pb2, orchestrator_pb2

_INTERVAL_S = 0.2
_MOST_CAUSES = 5

Condition = StrEnum("Condition", ["READY", "DRAINED", "GONE"])
"""The conditions that the command can wait for."""

_WAIT: Parameters = {
    "target": argument(
        str,
        "Wait for the replica with this name, or for all replicas of the stage with this name. Waits for the whole "
        "pipeline if omitted.",
        metavar="TARGET",
        complete=complete_target,
        default="",
    ),
    "condition": option(
        Condition,
        "Set the condition. ready: the replicas, and every edge of the pipeline, accept requests. drained: the "
        "replicas are drained and no request runs there. gone: the replicas, or the server, do not answer, or they "
        "are deregistered.",
        "--for",
        default=Condition.READY,
    ),
    "timeout": option(
        Kind.SECONDS,
        "Fail with exit code 5 if the condition is not met within this number of seconds.",
        "--timeout",
        default=600.0,
        min=0.1,
    ),
    **ADMIN_SERVER,
    **AS_JSON,
}


@with_parameters(_WAIT)
def wait(**values: Any) -> None:
    """Wait until the pipeline, a stage or a replica is ready, drained or gone. The server may be unreachable for a part
    of this time.
    """
    from stagemesh.cli.operation.admin_connection import AdminConnection

    began_s = time.monotonic()
    target, condition = values["target"], values["condition"]
    with AdminConnection(values["admin_server"]) as admin:
        _await(admin, target, condition, timeout_s=values["timeout"])
    waited_s = time.monotonic() - began_s
    document = {"target": target, "condition": condition.value, "waited_s": waited_s}
    text = f"{target or 'the pipeline'} is {condition.value} after {waited_s:.1f} s"
    print_result(document, text, as_json=values["as_json"])


def _await(admin: "AdminConnection", target: str, condition: Condition, *, timeout_s: float) -> None:
    """Returns when the condition is met. Raises DeadlineError after `timeout_s` seconds."""
    request = {"interval_s": _INTERVAL_S, "slowest": 1}
    ends_s = time.monotonic() + timeout_s
    cause = "the server has not answered"
    while (left_s := ends_s - time.monotonic()) > 0:
        try:
            with closing(admin.stream("WatchPipeline", request, timeout_s=left_s)) as snapshots:
                for snapshot in snapshots:
                    cause = unmet_cause(snapshot, target, condition)
                    if not cause:
                        return
        except DeadlineError:
            continue
        except UnavailableError as exc:
            if condition is Condition.GONE and not target:
                return
            cause = exc.message
        time.sleep(min(_INTERVAL_S, max(0.0, ends_s - time.monotonic())))
    raise DeadlineError(f"{target or 'the pipeline'} is not {condition.value} after {timeout_s:g} s: {cause}")


def unmet_cause(snapshot: "admin_pb2.WatchPipelineResponse", target: str, condition: Condition) -> str:
    """Returns why `condition` is not met, as text for people. Returns "" if it is met.

    `target` is the name of a replica or stage, or "" for the whole pipeline. Raises NotFoundError (UNKNOWN_TARGET) if
    the target does not exist and can therefore not be drained.
    """
    from stagemesh.v1 import stage_pb2

    replicas = [each for each in snapshot.replicas if each.name == target]
    replicas = replicas or [each for each in snapshot.replicas if not target or each.stage == target]
    match condition:
        case Condition.READY:
            causes = [_state(each) for each in replicas if each.state != stage_pb2.REPLICA_STATE_READY]
            if not target:
                causes = [] if snapshot.pipeline.ready else causes or ["an edge or a stage is not ready"]
            elif not replicas:
                causes = ["the server knows no replica and no stage with replicas of this name"]
        case Condition.DRAINED:
            if not replicas:
                raise NotFoundError(f"unknown replica or stage {target!r}", reason="UNKNOWN_TARGET")
            causes = [_undrained(each) for each in replicas]
        case Condition.GONE:
            left = [each for each in replicas if each.state != stage_pb2.REPLICA_STATE_UNREACHABLE]
            causes = [_state(each) for each in left] if target else ["the server answers"]
    causes = [cause for cause in causes if cause]
    more = f", and {len(causes) - _MOST_CAUSES} more" if len(causes) > _MOST_CAUSES else ""
    return ", ".join(causes[:_MOST_CAUSES]) + more


def _undrained(replica: "orchestrator_pb2.ReplicaStatus") -> str:
    """Returns what a replica must still do until it is drained, or "" if it is drained."""
    from stagemesh.v1 import stage_pb2

    if replica.state != stage_pb2.REPLICA_STATE_DRAINING:
        return _state(replica)
    running = max(replica.planned, replica.load.running + replica.load.queued)
    return f"{replica.name} runs {running} requests" if running else ""


def _state(replica: "orchestrator_pb2.ReplicaStatus") -> str:
    from stagemesh.v1 import stage_pb2

    state = enum_word(stage_pb2.ReplicaState.DESCRIPTOR, replica.state)
    return f"{replica.name} is {state}" + (f" ({replica.detail})" if replica.detail else "")


app = typer.Typer(help="Inspect and control a running pipeline.", no_args_is_help=True)


def _callback(command: Command) -> Callable[..., None]:
    @with_parameters({**command.parameters, **ADMIN_SERVER, **AS_JSON})
    def callback(*, admin_server: str, as_json: bool, **values: Any) -> None:
        from stagemesh.cli.operation.admin_connection import AdminConnection

        with AdminConnection(admin_server) as admin:
            _run(admin, command, values, as_json=as_json)

    return callback


def _run(admin: "AdminConnection", command: Command, values: dict[str, Any], *, as_json: bool) -> None:
    watch = values.get("watch", False)
    updates = (_answers(admin, command, values) for _ in ticks(interval_s=values.get("interval", 0.0), watch=watch))
    if watch and not as_json:
        show_views(_view(command, answers, values) for answers in updates)
        return
    failed = False
    for answer, replica in (each for answers in updates for each in answers):
        document = {"replica": replica, **to_json(answer)} if replica else to_json(answer)
        print_result(document, _display(command, answer, values, replica=replica), as_json=as_json)
        token: str = getattr(answer, "next_page_token", "")
        if token and not as_json:
            sys.stderr.write(f"there are more: --page-token {token}, or --all\n")
        failed = failed or command.fails(answer)
    if failed:
        raise typer.Exit(ExitCode.FAILED)


def _answers(admin: "AdminConnection", command: Command, values: dict[str, Any]) -> "Iterator[tuple[Message, str]]":
    """Calls the command's RPC, and yields each answer with the name of the replica that sent the answer.

    The name is empty if AdminService sent the answer.
    """
    from stagemesh.cli.operation.admin_connection import TIMEOUT_S, is_control, is_stream

    rpc = command.rpc if isinstance(command.rpc, str) else command.rpc(values)
    timeout_s = values.get("timeout", TIMEOUT_S)
    call = admin.call_all_pages if values.get("all_pages") else admin.call
    for replica in admin.replicas_of(values["target"]) if is_control(rpc) else ("",):
        values["replica"] = replica
        request = {**values, **command.fields(values)}
        if is_stream(rpc):
            with closing(admin.stream(rpc, request, timeout_s=timeout_s)) as events:
                yield from ((event, replica) for event in events)
        else:
            yield call(rpc, request, replica=replica, timeout_s=timeout_s), replica


def _view(command: Command, answers: "Iterator[tuple[Message, str]]", values: dict[str, Any]) -> "RenderableType":
    from rich.console import Group

    return Group(*(_display(command, answer, values, replica=replica) for answer, replica in answers))


def _display(command: Command, answer: Any, values: dict[str, Any], *, replica: str) -> "RenderableType":
    """Returns what is displayed for an answer. A text has the name of the replica that sent it, unless it is empty."""
    view = command.display(answer, values)
    return f"{replica}: {view}" if replica and isinstance(view, str) else view


_groups = {name: typer.Typer(help=text, no_args_is_help=True) for name, text in GROUPS.items()}
for _command in COMMANDS:
    _group, _, _name = _command.name.rpartition(" ")
    _groups.get(_group, app).command(_name, help=_command.description)(_callback(_command))
for _name, _app in _groups.items():
    app.add_typer(_app, name=_name)
app.command()(wait)
