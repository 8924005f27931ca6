"""Hosts, flows and gRPC servers that last for a `with` block."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc

from stagemesh.conformance import Host, open_flow, two_hosts
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet


@asynccontextmanager
async def started_host(name: str, **arguments: Any) -> AsyncGenerator[Host]:
    """Starts a host. `arguments` are for `Host`."""
    host = await Host.started(name, **arguments)
    try:
        yield host
    finally:
        await host.close()


@asynccontextmanager
async def flow_of_hosts(
    limits: Mapping[str, Any] | None = None, **flow: Any
) -> AsyncGenerator[tuple[Host, Host, Outlet, Inlet]]:
    """Opens a flow between two hosts. `limits` are for `two_hosts`, `flow` is for `open_flow`."""
    async with two_hosts(**(limits or {})) as (a, b):
        yield a, b, *open_flow(a, b, **flow)


@asynccontextmanager
async def serving(handler: grpc.GenericRpcHandler, options: Sequence[tuple[str, Any]] = ()) -> AsyncGenerator[str]:
    """Serves the methods of a handler on a free port, and yields "host:port"."""
    server = grpc.aio.server(options=options)
    server.add_generic_rpc_handlers((handler,))
    endpoint = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        yield endpoint
    finally:
        await server.stop(None)
