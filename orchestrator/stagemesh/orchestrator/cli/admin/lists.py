"""`stagemesh admin pipelines`, `stages`, `replicas`, `edges`, `requests`."""

from enum import StrEnum
from typing import Annotated

import typer

from stagemesh.orchestrator.cli.admin.options import (
    DEFAULT_SERVER,
    OnTarget,
    PageSize,
    PageToken,
    Server,
    StageFilter,
)
from stagemesh.orchestrator.cli.error_output import AsJson


class ReplicaWord(StrEnum):
    """The states of a replica, as an option takes them."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    FAILED = "failed"
    ASLEEP = "asleep"
    UNREACHABLE = "unreachable"


class RequestWord(StrEnum):
    """The states of a request, as an option takes them."""

    QUEUED = "queued"
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"


def pipelines(
    server: Server = DEFAULT_SERVER, page_size: PageSize = 0, page_token: PageToken = "", as_json: AsJson = False
) -> None:
    """Shows the pipelines that are served, what became of their requests, and who has some there."""
    from stagemesh.orchestrator.cli.admin.client import connected
    from stagemesh.orchestrator.cli.admin.output import show_page
    from stagemesh.orchestrator.cli.admin.tables import pipelines_view
    from stagemesh.v1 import admin_pb2

    with connected(server) as admin:
        request = admin_pb2.ListPipelinesRequest(page_size=page_size, page_token=page_token)
        answer = admin.call(admin.admin.ListPipelines, request)
    show_page(answer, pipelines_view(answer.pipelines), as_json=as_json, next_token=answer.next_page_token)


def stages(
    server: Server = DEFAULT_SERVER, page_size: PageSize = 0, page_token: PageToken = "", as_json: AsJson = False
) -> None:
    """Shows the stages, with their work."""
    from stagemesh.orchestrator.cli.admin.client import connected
    from stagemesh.orchestrator.cli.admin.output import show_page
    from stagemesh.orchestrator.cli.admin.tables import stages_table
    from stagemesh.v1 import admin_pb2

    with connected(server) as admin:
        request = admin_pb2.ListStagesRequest(page_size=page_size, page_token=page_token)
        answer = admin.call(admin.admin.ListStages, request)
    show_page(answer, stages_table(answer.stages), as_json=as_json, next_token=answer.next_page_token)


def replicas(
    stage: StageFilter = "",
    state: Annotated[ReplicaWord | None, typer.Option(help="Only those in this state.")] = None,
    server: Server = DEFAULT_SERVER,
    page_size: PageSize = 0,
    page_token: PageToken = "",
    as_json: AsJson = False,
) -> None:
    """Shows the replicas, with their load."""
    from stagemesh.orchestrator.cli.admin.client import connected
    from stagemesh.orchestrator.cli.admin.output import show_page
    from stagemesh.orchestrator.cli.admin.tables import replicas_table
    from stagemesh.v1 import admin_pb2, stage_pb2

    request = admin_pb2.ListReplicasRequest(page_size=page_size, page_token=page_token, stage=stage)
    if state is not None:
        request.state = stage_pb2.ReplicaState.Value(f"REPLICA_STATE_{state.name}")
    with connected(server) as admin:
        answer = admin.call(admin.admin.ListReplicas, request)
    show_page(answer, replicas_table(answer.replicas), as_json=as_json, next_token=answer.next_page_token)


def edges(
    server: Server = DEFAULT_SERVER, page_size: PageSize = 0, page_token: PageToken = "", as_json: AsJson = False
) -> None:
    """Shows the edges, what carries them, and what they have carried."""
    from stagemesh.orchestrator.cli.admin.client import connected
    from stagemesh.orchestrator.cli.admin.output import show_page
    from stagemesh.orchestrator.cli.admin.tables import edges_view
    from stagemesh.v1 import admin_pb2

    with connected(server) as admin:
        request = admin_pb2.ListEdgesRequest(page_size=page_size, page_token=page_token)
        answer = admin.call(admin.admin.ListEdges, request)
    show_page(answer, edges_view(answer.edges), as_json=as_json, next_token=answer.next_page_token)


def requests(
    on: OnTarget = "",
    state: Annotated[
        list[RequestWord] | None,
        typer.Option(help="Only those in this state; may be given again. Without it, those that wait and run."),
    ] = None,
    server: Server = DEFAULT_SERVER,
    page_size: PageSize = 0,
    page_token: PageToken = "",
    as_json: AsJson = False,
) -> None:
    """Shows the requests that wait and run, the oldest first; those that ended a moment ago by --state."""
    from stagemesh.orchestrator.cli.admin.client import connected
    from stagemesh.orchestrator.cli.admin.output import show_page
    from stagemesh.orchestrator.cli.admin.tables import requests_table
    from stagemesh.v1 import admin_pb2

    request = admin_pb2.ListRequestsRequest(
        page_size=page_size,
        page_token=page_token,
        target=on,
        states=[admin_pb2.RequestState.Value(f"REQUEST_STATE_{word.name}") for word in state or ()],
    )
    with connected(server) as admin:
        answer = admin.call(admin.admin.ListRequests, request)
    show_page(answer, requests_table(answer.requests), as_json=as_json, next_token=answer.next_page_token)
