"""Passes calls of StageControlService on to the replica that they name, as they are."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import grpc

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.fleet.replica_client import CONTROL_NAME
from stagemesh.rpc.error_boundary import answering, time_left_s

REPLICA_KEY = "stagemesh-replica"
"""The metadata that names the replica."""

_LONGEST_S = 3600.0
# Here they look after the rest of the pipeline too.
_OWN = {"Drain": "DrainReplicas", "Resume": "ResumeReplicas", "Shutdown": "RestartReplicas"}


class ControlForwarder(grpc.GenericRpcHandler):
    """Answers for every replica; messages pass serialized."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        """The handler of a call, where it is one of StageControlService."""
        service, _, method = handler_call_details.method.removeprefix("/").partition("/")
        if service != CONTROL_NAME:
            return None
        forward: Callable[..., Any] = partial(self._forward, method)
        return cast("Any", grpc.unary_unary_rpc_method_handler(forward))

    async def _forward(self, method: str, request: bytes, context: Any) -> bytes:
        metadata: Sequence[tuple[str, str | bytes]] = context.invocation_metadata() or ()
        name = next((str(value) for key, value in metadata if key == REPLICA_KEY), "")
        async with answering(context, **({"replica": name} if name else {})):
            if not name:
                raise InvalidRequestError(
                    f"name the replica in the call's metadata, by the key {REPLICA_KEY!r}", reason="NO_TARGET"
                )
            if method in _OWN:
                raise UnsupportedError(f"{method} is not forwarded; call AdminService.{_OWN[method]}")
            replica = self._directory.replica(name)
            left_s = time_left_s(context)
            return await replica.client.control(method, request, timeout_s=_LONGEST_S if left_s is None else left_s)
        raise AssertionError("answering ends every call that fails")
