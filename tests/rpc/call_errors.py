"""Errors of Stagemesh that tests expect."""

from collections.abc import AsyncIterable, Awaitable
from typing import TypeVar

import grpc
import pytest

from stagemesh.common.errors import StagemeshError
from stagemesh.rpc.error_mapping import from_rpc_error

_T = TypeVar("_T")
_Error = TypeVar("_Error", bound=StagemeshError)


async def error_of(
    call: Awaitable[object] | AsyncIterable[_T], *, peer: str = "the orchestrator", received: list[_T] | None = None
) -> StagemeshError:
    """Awaits a call, or adds its answers to `received`. Returns the error with which it fails."""
    try:
        if isinstance(call, Awaitable):
            await call
        else:
            async for answer in call:
                if received is not None:
                    received.append(answer)
    except grpc.aio.AioRpcError as exc:
        return from_rpc_error(exc, peer=peer)
    raise AssertionError("the call succeeded")


def raises(kind: type[_Error], *, reason: str, match: str | None = None) -> "pytest.RaisesExc[_Error]":
    """Expects an error with a reason. Otherwise like `pytest.raises`."""
    return pytest.raises(kind, match=match, check=lambda error: error.reason == reason)
