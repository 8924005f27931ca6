"""Typed calls of grpc.health.v1, whose own stub has no types."""

import grpc
from grpc_health.v1 import health_pb2

Request = health_pb2.HealthCheckRequest
Response = health_pb2.HealthCheckResponse


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
