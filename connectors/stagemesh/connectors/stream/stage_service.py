"""Registers StageService with a server so that the messages of its two-way streams stay serialized."""

from functools import partial
from typing import Any, cast

import grpc

from stagemesh.rpc.raw_methods import add_with_raw_methods
from stagemesh.v1 import stage_pb2, stage_pb2_grpc

_SERVICE = stage_pb2.DESCRIPTOR.services_by_name["StageService"].full_name


def add_stage_service(servicer: stage_pb2_grpc.StageServiceServicer, server: grpc.aio.Server) -> None:
    """Adds `servicer`, whose PutChunk and ExecuteSteps receive and yield serialized messages."""
    serialized = cast("Any", grpc.stream_stream_rpc_method_handler)
    add_with_raw_methods(
        partial(stage_pb2_grpc.add_StageServiceServicer_to_server, servicer),
        server,
        service=_SERVICE,
        raw={"PutChunk": serialized(servicer.PutChunk), "ExecuteSteps": serialized(servicer.ExecuteSteps)},
    )
