"""What a shell completes: the names that the server knows. Nothing where it does not answer at once."""

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import typer

from stagemesh.orchestrator.cli.options import DEFAULT_ADMIN_SERVER

if TYPE_CHECKING:
    from stagemesh.orchestrator.cli.admin.client import AdminConnection

_PATIENCE_S = 0.5


def complete_target(ctx: typer.Context, incomplete: str) -> list[str]:
    """Stages and replicas."""
    return _matching(ctx, incomplete, lambda admin: [*_stages(admin), *_replicas(admin)])


def complete_stage(ctx: typer.Context, incomplete: str) -> list[str]:
    """Stages."""
    return _matching(ctx, incomplete, _stages)


def complete_replica(ctx: typer.Context, incomplete: str) -> list[str]:
    """Replicas."""
    return _matching(ctx, incomplete, _replicas)


def complete_edge(ctx: typer.Context, incomplete: str) -> list[str]:
    """Edges."""
    return _matching(ctx, incomplete, _edges)


def complete_request(ctx: typer.Context, incomplete: str) -> list[str]:
    """Requests that wait and run."""
    return _matching(ctx, incomplete, _requests)


def _matching(ctx: typer.Context, incomplete: str, names: "Callable[[AdminConnection], Iterable[str]]") -> list[str]:
    from stagemesh.common.errors import StagemeshError
    from stagemesh.orchestrator.cli.admin.client import connected

    try:
        with connected(ctx.params.get("server") or DEFAULT_ADMIN_SERVER) as admin:
            return [name for name in names(admin) if name.startswith(incomplete)]
    except StagemeshError:
        return []


def _stages(admin: "AdminConnection") -> list[str]:
    from stagemesh.v1 import admin_pb2

    answer = admin.call(admin.admin.ListStages, admin_pb2.ListStagesRequest(), timeout_s=_PATIENCE_S)
    return [stage.name for stage in answer.stages]


def _replicas(admin: "AdminConnection") -> list[str]:
    from stagemesh.v1 import admin_pb2

    answer = admin.call(admin.admin.ListReplicas, admin_pb2.ListReplicasRequest(), timeout_s=_PATIENCE_S)
    return [replica.name for replica in answer.replicas]


def _edges(admin: "AdminConnection") -> list[str]:
    from stagemesh.v1 import admin_pb2

    answer = admin.call(admin.admin.ListEdges, admin_pb2.ListEdgesRequest(), timeout_s=_PATIENCE_S)
    return [edge.edge.name for edge in answer.edges]


def _requests(admin: "AdminConnection") -> list[str]:
    from stagemesh.v1 import admin_pb2

    answer = admin.call(admin.admin.ListRequests, admin_pb2.ListRequestsRequest(), timeout_s=_PATIENCE_S)
    return [request.request_id for request in answer.requests]
