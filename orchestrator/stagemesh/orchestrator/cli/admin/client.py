"""A connection to the port for operators."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.rpc.channels import CHANNEL_OPTIONS
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1.admin_pb2_grpc import AdminServiceStub
from stagemesh.v1.control_pb2_grpc import StageControlServiceStub

if TYPE_CHECKING:
    from google.protobuf.message import Message

CALL_S = 15.0
UNREACHABLE = "ADMIN_UNREACHABLE"
_REPLICA_KEY = "stagemesh-replica"

Answer = TypeVar("Answer", bound="Message")


class AdminConnection:
    """Calls AdminService, and a replica's controls through it. Every method raises a StagemeshError."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self.admin = AdminServiceStub(self._channel)
        self.controls = StageControlServiceStub(self._channel)

    def call(self, method: Callable[..., Answer], request: "Message", *, timeout_s: float = CALL_S) -> Answer:
        """The answer of AdminService."""
        try:
            return method(request, timeout=timeout_s)
        except grpc.RpcError as exc:
            raise self._error(exc) from exc

    def control(
        self, method: Callable[..., Answer], request: "Message", *, replica: str, timeout_s: float = CALL_S
    ) -> Answer:
        """The answer of a replica's own controls."""
        try:
            return method(request, timeout=timeout_s, metadata=((_REPLICA_KEY, replica),))
        except grpc.RpcError as exc:
            raise self._error(exc) from exc

    def stream(
        self, method: Callable[..., Any], request: "Message", *, timeout_s: float | None = None
    ) -> Generator[Any]:
        """The answers of AdminService; closing the generator hangs up."""
        call = method(request, timeout=timeout_s)
        try:
            yield from call
        except grpc.RpcError as exc:
            raise self._error(exc) from exc
        finally:
            call.cancel()

    def close(self) -> None:
        """Disconnects."""
        self._channel.close()

    def _error(self, exc: grpc.RpcError) -> StagemeshError:
        error = from_rpc_error(exc, peer=f"AdminService at {self._endpoint}")
        if isinstance(error, UnavailableError) and "peer" in error.metadata:
            error.reason = UNREACHABLE
        return error


@contextmanager
def connected(endpoint: str) -> Generator[AdminConnection]:
    """A connection, closed at the end."""
    connection = AdminConnection(endpoint)
    try:
        yield connection
    finally:
        connection.close()
