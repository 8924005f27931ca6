"""Typed calls of grpc.health.v1, whose own stub has no types."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2

Request = health_pb2.HealthCheckRequest
Response = health_pb2.HealthCheckResponse
_MESSAGES: Any = {"request_serializer": Request.SerializeToString, "response_deserializer": Response.FromString}


def check(channel: grpc.aio.Channel) -> grpc.aio.UnaryUnaryMultiCallable[Request, Response]:
    """Health.Check."""
    return channel.unary_unary(
        "/grpc.health.v1.Health/Check",
        request_serializer=Request.SerializeToString,
        response_deserializer=Response.FromString,
    )


def watch(channel: grpc.aio.Channel) -> grpc.aio.UnaryStreamMultiCallable[Request, Response]:
    """Health.Watch."""
    return channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=Request.SerializeToString,
        response_deserializer=Response.FromString,
    )


def read_status(channel: grpc.Channel, service: str = "", *, timeout_s: float) -> int:
    """Calls Health.Check over a synchronous channel. Returns the status."""
    method: Any = channel.unary_unary("/grpc.health.v1.Health/Check", **_MESSAGES)
    return int(method(Request(service=service), timeout=timeout_s).status)


def wait_status(channel: grpc.Channel, service: str = "", *, status: int = Response.SERVING, timeout_s: float) -> None:
    """Calls Health.Watch over a synchronous channel, and waits for a status."""
    method: Any = channel.unary_stream("/grpc.health.v1.Health/Watch", **_MESSAGES)
    call = method(Request(service=service), timeout=timeout_s, wait_for_ready=True)
    assert any(response.status == status for response in call)
    call.cancel()
