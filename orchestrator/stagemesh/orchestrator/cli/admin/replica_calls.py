"""Calls of the controls of one replica, or of all of a stage's, one after the other."""

import json
from collections.abc import Callable, Iterator
from typing import TypeVar

import typer
from google.protobuf.message import Message

from stagemesh.common.errors import NotFoundError
from stagemesh.orchestrator.cli.admin.client import AdminConnection, connected
from stagemesh.orchestrator.cli.admin.json_output import to_plain
from stagemesh.v1 import admin_pb2

_PAGE = 1000

Answer = TypeVar("Answer", bound=Message)


def call_replicas(
    server: str,
    target: str,
    call: Callable[[AdminConnection, str], Answer],
    *,
    describe: Callable[[Answer], str],
    as_json: bool,
) -> None:
    """Calls each replica of the target and shows its answer on a line; the first error ends it."""
    with connected(server) as admin:
        for replica in replicas_of(admin, target):
            answer = call(admin, replica)
            if as_json:
                typer.echo(json.dumps({"replica": replica, **to_plain(answer)}, ensure_ascii=False))
            else:
                typer.echo(f"{replica}: {describe(answer)}")


def replicas_of(admin: AdminConnection, target: str) -> list[str]:
    """The replica of this name, or those of the stage; raises NotFoundError."""
    known = list(_replicas(admin))
    if target in {replica.name for replica in known}:
        return [target]
    found = [replica.name for replica in known if replica.stage == target]
    if not found:
        raise NotFoundError(f"no replica or stage {target!r} here", reason="UNKNOWN_TARGET")
    return found


def _replicas(admin: AdminConnection) -> Iterator[admin_pb2.ReplicaStatus]:
    request = admin_pb2.ListReplicasRequest(page_size=_PAGE)
    while True:
        answer = admin.call(admin.admin.ListReplicas, request)
        yield from answer.replicas
        if not answer.next_page_token:
            return
        request.page_token = answer.next_page_token
