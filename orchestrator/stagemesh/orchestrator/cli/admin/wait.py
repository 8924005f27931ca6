"""`stagemesh admin wait`: waits until a pipeline, a stage or a replica is ready, drained or gone."""

import time
from collections.abc import Mapping
from contextlib import closing
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.common.errors import DeadlineError, NotFoundError, UnavailableError
from stagemesh.orchestrator.cli.admin.commands import complete_target
from stagemesh.orchestrator.cli.contexts.addresses import ADMIN_SERVER
from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import Parameter, argument, option
from stagemesh.orchestrator.cli.output import enum_word, print_json

if TYPE_CHECKING:
    from stagemesh.orchestrator.cli.admin.client import AdminConnection
    from stagemesh.v1 import admin_pb2, orchestrator_pb2

_INTERVAL_S = 0.2
_MOST_CAUSES = 5

Condition = StrEnum("Condition", ["READY", "DRAINED", "GONE"])
"""The conditions that the command can wait for."""

PARAMETERS: Mapping[str, Parameter] = {
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
        float,
        "Fail with exit code 5 if the condition is not met within this number of seconds.",
        "--timeout",
        default=600.0,
        min=0.1,
        metavar="SECONDS",
    ),
    **ADMIN_SERVER,
    "as_json": Parameter(AsJson, False),
}


def wait(**values: Any) -> None:
    """Wait until the pipeline, a stage or a replica is ready, drained or gone. The server may be unreachable for a part
    of this time.
    """
    from stagemesh.orchestrator.cli.admin.client import AdminConnection

    began_s = time.monotonic()
    target, condition = values["target"], values["condition"]
    with AdminConnection(values["admin_server"]) as admin:
        _await(admin, target, condition, timeout_s=values["timeout"])
    waited_s = time.monotonic() - began_s
    if values["as_json"]:
        print_json({"target": target, "condition": condition.value, "waited_s": waited_s})
    else:
        typer.echo(f"{target or 'the pipeline'} is {condition.value} after {waited_s:.1f} s")


def _await(admin: "AdminConnection", target: str, condition: Condition, *, timeout_s: float) -> None:
    """Returns when the condition is met. Raises DeadlineError after `timeout_s` seconds."""
    from stagemesh.v1 import admin_pb2

    request = admin_pb2.WatchPipelineRequest(interval_s=_INTERVAL_S, slowest=1)
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
