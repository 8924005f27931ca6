"""Serves AdminService, and forwards StageControlService, on a port of their own."""

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

from stagemesh.orchestrator.admin.control_forwarding import ControlForwarder
from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.admin.servicer import AdminServicer
from stagemesh.orchestrator.fleet.replica_client import CONTROL_NAME
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.rpc.server import Server
from stagemesh.v1 import admin_pb2, admin_pb2_grpc

SERVICE_NAME = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name
LIVENESS = "liveness"


@asynccontextmanager
async def serving_admin(orchestrator: Orchestrator, listen: str) -> AsyncGenerator[int]:
    """Serves within the block, which is given the port. All facets are SERVING from the start to the end."""
    server = Server(listen)
    directory = Directory(orchestrator.pipeline, orchestrator.fleet)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(AdminServicer(orchestrator, directory), server.grpc)
    server.grpc.add_generic_rpc_handlers((ControlForwarder(directory),))
    for service in (SERVICE_NAME, CONTROL_NAME):
        server.reflect(service)
    for facet in ("", SERVICE_NAME, CONTROL_NAME, LIVENESS):
        server.set_health(facet, serving=True)
    port = await server.start()
    try:
        yield port
    finally:
        await server.stop(grace_s=0)
