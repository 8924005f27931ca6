"""The connection of the command line to AdminService.

AdminService also forwards calls of StageControlService to replicas.
"""

from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message_factory import GetMessageClass

from stagemesh.common.errors import NotFoundError, StagemeshError, UnavailableError
from stagemesh.rpc.channels import CHANNEL_OPTIONS, open_sync
from stagemesh.rpc.credentials import PROCESS
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import admin_pb2, control_pb2
from stagemesh.v1.admin_pb2_grpc import AdminServiceStub
from stagemesh.v1.control_pb2_grpc import StageControlServiceStub

if TYPE_CHECKING:
    from google.protobuf.descriptor import MethodDescriptor

TIMEOUT_S = 15.0
UNREACHABLE = "ADMIN_UNREACHABLE"
_REPLICA_KEY = "stagemesh-replica"
_PAGE = 1000

_ADMIN = admin_pb2.DESCRIPTOR.services_by_name["AdminService"].methods_by_name
_CONTROL = control_pb2.DESCRIPTOR.services_by_name["StageControlService"].methods_by_name


def is_control(rpc: str) -> bool:
    """Returns whether the RPC with this name belongs to StageControlService. All other RPCs belong to AdminService."""
    return rpc not in _ADMIN


def is_stream(rpc: str) -> bool:
    """Returns whether the RPC with this name returns a stream of messages instead of one message."""
    return bool(_method(rpc).server_streaming)


class AdminConnection(AbstractContextManager["AdminConnection"]):
    """A connection that calls RPCs of AdminService and StageControlService by name.

    `values` contains the fields of an RPC's request by name. Entries that are None or no such fields are ignored. All
    methods raise a StagemeshError if a call fails. The end of the `with` block closes the connection.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._channel = open_sync(endpoint, PROCESS.credentials, CHANNEL_OPTIONS)
        self._stubs = AdminServiceStub(self._channel), StageControlServiceStub(self._channel)

    def call(
        self, rpc: str, values: Mapping[str, Any] | None = None, *, replica: str = "", timeout_s: float = TIMEOUT_S
    ) -> Any:
        """Calls an RPC that returns one message, and returns this message.

        - `replica` is the name of the replica to which an RPC of StageControlService is forwarded. For an RPC of
          AdminService, it is empty.
        - `timeout_s` is the time limit of the call in seconds.
        """
        metadata = ((_REPLICA_KEY, replica),) if replica else ()
        try:
            call = getattr(self._stubs[is_control(rpc)], rpc)
            return call(_request(rpc, values), timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as exc:
            raise self._error(exc) from exc

    def call_all_pages(
        self, rpc: str, values: Mapping[str, Any] | None = None, *, replica: str = "", timeout_s: float = TIMEOUT_S
    ) -> Any:
        """Calls an RPC that lists items until the last page, and returns one message with the items of all pages.

        `timeout_s` limits the call of each page.
        """
        merged = self.call(rpc, values, replica=replica, timeout_s=timeout_s)
        while token := merged.next_page_token:
            merged.ClearField("next_page_token")
            following = {**(values or {}), "page_token": token}
            merged.MergeFrom(self.call(rpc, following, replica=replica, timeout_s=timeout_s))
        return merged

    def stream(self, rpc: str, values: Mapping[str, Any], *, timeout_s: float | None = None) -> Generator[Any]:
        """Yields the answers of a streaming RPC of AdminService. Closing the generator cancels the call.

        `timeout_s` is the time limit of the whole call in seconds. None means no limit.
        """
        call = getattr(self._stubs[0], rpc)(_request(rpc, values), timeout=timeout_s)
        try:
            yield from call
        except grpc.RpcError as exc:
            raise self._error(exc) from exc
        finally:
            call.cancel()

    def replicas_of(self, target: str) -> list[str]:
        """Returns the names of the replicas that `target` selects.

        The name of a replica selects this replica. The name of a stage selects all replicas of the stage. Raises
        NotFoundError (UNKNOWN_TARGET) if no replica and no stage has the name `target`.
        """
        replicas = self.call_all_pages("ListReplicas", {"page_size": _PAGE}).replicas
        known: dict[str, str] = {replica.name: replica.stage for replica in replicas}
        found = [target] if target in known else [name for name, stage in known.items() if stage == target]
        if not found:
            raise NotFoundError(f"unknown replica or stage {target!r}", reason="UNKNOWN_TARGET")
        return found

    def __exit__(self, *_: object) -> None:
        self._channel.close()

    def _error(self, exc: grpc.RpcError) -> StagemeshError:
        error = from_rpc_error(exc, peer=f"AdminService at {self._endpoint}")
        if isinstance(error, UnavailableError) and "peer" in error.metadata:
            error.reason = UNREACHABLE
        return error


def _method(rpc: str) -> "MethodDescriptor":
    return (_ADMIN if rpc in _ADMIN else _CONTROL)[rpc]


def _request(rpc: str, values: Mapping[str, Any] | None) -> Any:
    message = _method(rpc).input_type
    given = {name: value for name, value in (values or {}).items() if value is not None}
    return GetMessageClass(message)(**{name: given[name] for name in given.keys() & message.fields_by_name.keys()})
