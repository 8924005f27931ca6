"""The parameters that select stages, replicas and requests, with their shell completion."""

from collections.abc import Callable, Sequence
from typing import Any

import typer

from stagemesh.cli.terminal.contexts import DEFAULT_ADMIN_SERVER
from stagemesh.cli.terminal.options import Kind, argument
from stagemesh.common.errors import StagemeshError

_COMPLETION_TIMEOUT_S = 0.5
# For each list RPC of AdminService: the answer's field with the items, and a function that returns an item's name.
_LISTS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "ListStages": ("stages", lambda stage: stage.name),
    "ListReplicas": ("replicas", lambda replica: replica.name),
    "ListEdges": ("edges", lambda edge: edge.edge.name),
    "ListRequests": ("requests", lambda request: request.request_id),
}


def complete_names(*rpcs: str) -> Callable[[typer.Context, str], list[str]]:
    """Returns a shell completion callback that suggests the names of the items that list RPCs return.

    `rpcs` are the names of these RPCs, such as "ListStages". The callback suggests nothing if a call fails.
    """

    def complete(ctx: typer.Context, incomplete: str) -> list[str]:
        from stagemesh.cli.operation.admin_connection import AdminConnection

        try:
            with AdminConnection(ctx.params.get("admin_server") or DEFAULT_ADMIN_SERVER) as admin:
                return [name for rpc in rpcs for name in _names(admin, rpc) if name.startswith(incomplete)]
        except StagemeshError:
            return []

    return complete


def _names(admin: Any, rpc: str) -> Sequence[str]:
    items, name = _LISTS[rpc]
    answer = admin.call(rpc, timeout_s=_COMPLETION_TIMEOUT_S)
    return [name(item) for item in getattr(answer, items)]


complete_target = complete_names("ListStages", "ListReplicas")
complete_request = complete_names("ListRequests")
complete_replica = complete_names("ListReplicas")

TARGET = {
    "target": argument(
        str,
        "Select the replica with this name, or all replicas of the stage with this name.",
        metavar="TARGET",
        complete=complete_target,
    )
}
REQUEST_ID = {"request_id": argument(Kind.ID, "Select the request with this id.", complete=complete_request)}
STAGE = {
    "stage": argument(str, "Select the stage with this name.", metavar="STAGE", complete=complete_names("ListStages"))
}
ADAPTER_NAME = argument(Kind.NAME, "Select the loaded adapter with this name.")
