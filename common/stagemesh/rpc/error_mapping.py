"""Converts StagemeshErrors to gRPC statuses and back.

A status has the error's code and message, one ErrorInfo, and a RetryInfo if the error has a retry delay.
"""

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]

from stagemesh.common.errors import DeadlineError, StagemeshError, UnavailableError, make_error

DOMAIN = "stagemesh"
_STATUS_DETAILS_KEY = "grpc-status-details-bin"


def to_status(error: StagemeshError) -> status_pb2.Status:
    """Returns the google.rpc.Status that represents an error."""
    details = [_pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=error.metadata))]
    if error.retry_after_s is not None:
        delay = duration_pb2.Duration()
        delay.FromNanoseconds(int(error.retry_after_s * 1e9))
        details.append(_pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    return status_pb2.Status(code=int(error.code), message=error.message, details=details)


def to_trailing_metadata(error: StagemeshError) -> tuple[tuple[str, bytes], ...]:
    """Returns an error's trailing metadata, which a servicer passes to `context.abort` with the code and message."""
    return ((_STATUS_DETAILS_KEY, to_status(error).SerializeToString()),)


def to_grpc_code(error: StagemeshError) -> grpc.StatusCode:
    """Returns the gRPC status code of an error."""
    return next(code for code in grpc.StatusCode if code.value[0] == error.code)


def from_rpc_error(error: grpc.RpcError, *, peer: str) -> StagemeshError:
    """Returns the StagemeshError for a failed call to `peer`.

    If the status has no details from Stagemesh, the returned error names `peer` in its message.
    """
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError), "gRPC raises errors that are calls"
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            return _from_status(status_pb2.Status.FromString(value))
    code, message = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        return UnavailableError(f"{peer} cannot be reached ({message})", metadata={"peer": peer})
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"no answer from {peer} before the deadline", metadata={"peer": peer})
    return make_error(code.value[0], f"{peer}: {message}", metadata={"peer": peer})


def _from_status(status: status_pb2.Status) -> StagemeshError:
    info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    retry_after_s: float | None = None
    for detail in status.details:
        detail.Unpack(info)
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    return make_error(
        status.code, status.message, reason=info.reason, metadata=dict(info.metadata), retry_after_s=retry_after_s
    )


def _pack(message: error_details_pb2.ErrorInfo | error_details_pb2.RetryInfo) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
