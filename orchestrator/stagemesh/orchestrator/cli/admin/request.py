"""`stagemesh admin request`, `cancel`, `probe`."""

import typer

from stagemesh.orchestrator.cli.admin.options import DEFAULT_SERVER, Consumer, Edge, Producer, RequestId, Server
from stagemesh.orchestrator.cli.error_output import AsJson


def request(request_id: RequestId, server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """Shows one request: what each stage said when, what it waits for, and its chunks in flight."""
    from stagemesh.orchestrator.cli.admin.client import connected
    from stagemesh.orchestrator.cli.admin.output import show_page
    from stagemesh.orchestrator.cli.admin.request_view import request_view
    from stagemesh.v1 import admin_pb2

    with connected(server) as admin:
        answer = admin.call(admin.admin.GetRequest, admin_pb2.GetRequestRequest(request_id=request_id))
    show_page(answer, request_view(answer), as_json=as_json, next_token="")


def cancel(request_id: RequestId, server: Server = DEFAULT_SERVER, as_json: AsJson = False) -> None:
    """Stops a request on every stage; returns once all have let go."""
    from stagemesh.orchestrator.cli.admin.client import connected
    from stagemesh.orchestrator.cli.admin.output import show_json
    from stagemesh.v1 import admin_pb2

    with connected(server) as admin:
        answer = admin.call(
            admin.admin.CancelRequest, admin_pb2.AdminServiceCancelRequestRequest(request_id=request_id)
        )
    if as_json:
        show_json(answer)
    else:
        typer.echo(f"cancelled {request_id}; every stage has let go")


def probe(
    edge: Edge,
    producer: Producer = "",
    consumer: Consumer = "",
    server: Server = DEFAULT_SERVER,
    as_json: AsJson = False,
) -> None:
    """Asks producers anew by which connector they would feed their consumers."""
    from stagemesh.client.descriptions import decode_edge
    from stagemesh.orchestrator.cli.admin.client import connected
    from stagemesh.orchestrator.cli.admin.output import show_page
    from stagemesh.orchestrator.cli.tables import links_table
    from stagemesh.v1 import admin_pb2

    with connected(server) as admin:
        answer = admin.call(
            admin.admin.ProbeEdge,
            admin_pb2.AdminServiceProbeEdgeRequest(edge=edge, producer=producer, consumer=consumer),
        )
    show_page(answer, links_table([decode_edge(answer.edge)]), as_json=as_json, next_token="")
    if any(link.HasField("error") for link in answer.edge.links):
        raise typer.Exit(1)
