"""Registers services in which some methods receive and send serialized messages instead of parsed ones."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import grpc

from stagemesh.v1 import stage_pb2, stage_pb2_grpc

_STAGE_SERVICE = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name


def add_stage_service(servicer: stage_pb2_grpc.StageServiceServicer, server: grpc.aio.Server) -> None:
    """Adds a StageService to a server. Its methods PutChunk and ExecuteSteps receive and yield serialized messages."""
    raw_stream = cast("Any", grpc.stream_stream_rpc_method_handler)
    add_with_raw_methods(
        partial(stage_pb2_grpc.add_StageServiceServicer_to_server, servicer),
        server,
        service=_STAGE_SERVICE,
        raw={"PutChunk": raw_stream(servicer.PutChunk), "ExecuteSteps": raw_stream(servicer.ExecuteSteps)},
    )


def add_with_raw_methods(
    add: Callable[[grpc.aio.Server], None], server: grpc.aio.Server, *, service: str, raw: Mapping[str, Any]
) -> None:
    """Adds a service to `server` and replaces some of its generated handlers.

    Args:
        add: The generated function that adds the service to a server.
        server: The server to which the service is added.
        service: The service's full name.
        raw: The replacement handlers by method name.
    """
    generated = _HandlerCollector()
    add(cast("grpc.aio.Server", generated))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {**generated.by_method, **raw}),))


class _HandlerCollector:
    """A substitute for a grpc.aio.Server that collects the handlers that generated code registers."""

    def __init__(self) -> None:
        self.by_method: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.by_method.update(handlers)

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """Does nothing, because generated code passes the same handlers to `add_registered_method_handlers`."""
