"""Registers StageService with a server so that PutChunk's messages come as they are on the wire (see `pieces`)."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

import grpc

from stagemesh.v1 import stage_pb2, stage_pb2_grpc

_SERVICE = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name


class _Handlers:
    """Stands in for a server, to see what the generated code would register."""

    def __init__(self) -> None:
        self.by_method: dict[str, Any] = {}

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:  # noqa: ARG002
        self.by_method.update(handlers)

    def add_generic_rpc_handlers(self, handlers: Sequence[Any]) -> None:
        """The same again, for servers without registered methods."""


def add_stage_service(servicer: stage_pb2_grpc.StageServiceServicer, server: grpc.aio.Server) -> None:
    """Adds `servicer`, whose PutChunk takes and yields serialized messages (`DataPlane.serve_put`)."""
    generated = _Handlers()
    stage_pb2_grpc.add_StageServiceServicer_to_server(servicer, cast("grpc.aio.Server", generated))
    raw = cast("Any", grpc.stream_stream_rpc_method_handler)(servicer.PutChunk)
    handlers: dict[str, Any] = {**generated.by_method, "PutChunk": raw}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, handlers),))
