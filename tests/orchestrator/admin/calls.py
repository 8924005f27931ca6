"""Calls of AdminService."""

from collections.abc import Awaitable

import grpc

from stagemesh.common.errors import StagemeshError
from stagemesh.rpc.error_mapping import from_rpc_error


async def error_of(call: Awaitable[object]) -> StagemeshError:
    """Returns the error of a call."""
    try:
        await call
    except grpc.aio.AioRpcError as exc:
        return from_rpc_error(exc, peer="the orchestrator")
    raise AssertionError("the call succeeded")
