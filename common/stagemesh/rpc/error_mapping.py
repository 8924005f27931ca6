"""The conversion of StagemeshErrors to gRPC statuses and to messages within a stream, and back.

A status contains the error's code and message, one ErrorInfo, and a RetryInfo if the error's `retry_after_s` is set.
"""

import re
from contextlib import suppress
from heapq import nsmallest

import grpc
from google.protobuf.any import pack
from google.protobuf.duration import from_nanoseconds
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from stagemesh.common.errors import Code, DeadlineError, StagemeshError, UnavailableError, UnsupportedError, error_class
from stagemesh.common.wire.encoding import to_message
from stagemesh.v1 import chunk_pb2

DOMAIN = "stagemesh"
BROKEN = frozenset({Code.UNAVAILABLE, Code.CANCELLED, Code.UNKNOWN, Code.INTERNAL})
"""The codes that gRPC itself reports if the server or the connection to it fails. Errors of a service have a reason."""
_FAILED_HANDSHAKE = re.compile("failed to connect.*(Socket closed|SSL|handshake)", re.IGNORECASE)
_TLS_HINT = "; if only one of both uses TLS, or a certificate is refused, correct `tls` (the option --tls)"
_TOO_LARGE = re.compile(r"message.* larger than max|size larger than|exceeds maximum size", re.IGNORECASE)
"""The texts by which implementations of gRPC reject a message that is larger than the sender or the receiver allows."""
_STATUS_DETAILS_KEY = "grpc-status-details-bin"
# HTTP/2 trailers contain a status's message twice, and gRPC may reject trailers of 8 KiB or more.
_MAX_STATUS_BYTES, _MAX_MESSAGE_BYTES, _MAX_VALUE_BYTES, _MAX_VALUES = 1024, 4096, 256, 64
_MAX_METADATA_BYTES = 3072


def to_status(error: StagemeshError) -> grpc.Status:
    """Returns the gRPC status of an error: the code, the message and the trailing metadata with which an RPC ends."""
    short = error_to_wire(error)
    details = [pack(error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN, metadata=short.metadata))]
    if error.retry_after_s is not None:
        delay = from_nanoseconds(int(error.retry_after_s * 1e9))
        details.append(pack(error_details_pb2.RetryInfo(retry_delay=delay)))
    if error.facts:
        details.append(pack(short.facts))
    message = _shortened(error.message, _MAX_STATUS_BYTES)
    return rpc_status.to_status(status_pb2.Status(code=int(error.code), message=message, details=details))


def is_broken(failure: grpc.RpcError, error: StagemeshError, *, peer: str) -> bool:
    """Returns whether a call failed because the server terminated or the connection to the server broke.

    `error` is the error that `from_rpc_error` made of `failure`. Its metadata names `peer` if gRPC itself has reported
    the failure, and not if a service has reported it.
    """
    assert isinstance(failure, grpc.Call | grpc.aio.AioRpcError), "gRPC raises errors that are calls"
    return failure.code().value[0] in BROKEN and error.metadata.get("peer") == peer


def from_rpc_error(error: grpc.RpcError, *, peer: str) -> StagemeshError:
    """Returns the StagemeshError for a failed call to `peer`.

    If the status was not created by Stagemesh, the message of the returned error names `peer`.
    """
    assert isinstance(error, grpc.Call | grpc.aio.AioRpcError), "gRPC raises errors that are calls"
    for key, value in error.trailing_metadata() or ():
        if key == _STATUS_DETAILS_KEY and isinstance(value, bytes):
            # Of a malformed status, only the code and the text of gRPC count.
            with suppress(DecodeError, OverflowError):
                if (found := _from_status(status_pb2.Status.FromString(value))) is not None:
                    return found
    code, message = error.code(), error.details() or ""
    if code is grpc.StatusCode.UNAVAILABLE:
        hint = _TLS_HINT if _FAILED_HANDSHAKE.search(message) else ""
        return UnavailableError(f"{peer} cannot be reached ({message}){hint}", metadata={"peer": peer})
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineError(f"no answer from {peer} before the deadline", metadata={"peer": peer})
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LARGE.search(message):
        problem = f"a message to or from {peer} is too large ({message}); shorten the input, or request less"
        return error_class(Code.INVALID_ARGUMENT)(problem, reason="MESSAGE_TOO_LARGE")
    return error_class(code.value[0])(f"{peer}: {message}", metadata={"peer": peer})


def from_ended_stream(error: grpc.RpcError, *, peer: str) -> StagemeshError:
    """Returns the error with which a stream to `peer` has ended.

    If the status was not created by Stagemesh, the connection broke, whatever the code: a proxy, gRPC or an exception
    in the peer has ended the stream. Only UNIMPLEMENTED is an answer: gRPC itself rejects an unknown method with it.
    """
    found = from_rpc_error(error, peer=peer)
    if found.metadata.get("peer") != peer or isinstance(found, UnavailableError | UnsupportedError):
        return found
    return UnavailableError(found.message, reason="CONNECTION_LOST", metadata=found.metadata)


def _from_status(status: status_pb2.Status) -> StagemeshError | None:
    """Returns the error that a service of Stagemesh has reported, or None if the status has another origin."""
    info, retry, facts = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo(), chunk_pb2.ErrorFacts()
    retry_after_s: float | None = None
    for detail in status.details:
        if info.domain != DOMAIN:
            detail.Unpack(info)
        detail.Unpack(facts)
        if detail.Unpack(retry):
            retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
    if info.domain != DOMAIN:
        return None
    kind = error_class(status.code, info.reason)
    return kind(
        status.message,
        reason=info.reason,
        metadata=info.metadata,
        facts=_facts_from_wire(facts),
        retry_after_s=retry_after_s,
    )


def _facts_from_wire(message: chunk_pb2.ErrorFacts) -> dict[str, int]:
    return {field.name: value for field, value in message.ListFields()}


def error_to_wire(error: StagemeshError) -> chunk_pb2.Error:
    """Converts an error to its protobuf message, with at most 4 KiB of text, and 256 bytes in each metadata value.

    Omits the longest values beyond 3 KiB in all, because a status with too large trailers loses its cause.
    """
    shortened = (
        (_shortened(name, _MAX_VALUE_BYTES), _shortened(value, _MAX_VALUE_BYTES))
        for name, value in error.metadata.items()
    )
    metadata, left_bytes = dict[str, str](), _MAX_METADATA_BYTES
    for name, value in sorted(shortened, key=lambda entry: len("".join(entry))):
        left_bytes -= len((name + value).encode())
        if left_bytes >= 0:
            metadata[name] = value
    facts = chunk_pb2.ErrorFacts(**error.facts) if error.facts else None
    message = _shortened(error.message, _MAX_MESSAGE_BYTES)
    return to_message(chunk_pb2.Error, error, message=message, metadata=metadata, facts=facts)


def _shortened(text: str, most_bytes: int) -> str:
    # A path that is not valid UTF-8 contains characters that cannot be encoded.
    encoded = text.encode(errors="replace")
    if len(encoded) <= most_bytes:
        return encoded.decode()
    return encoded[: most_bytes - 4].decode(errors="ignore") + "…"


def error_from_wire(message: chunk_pb2.Error) -> StagemeshError:
    """Converts a protobuf message to the error that a peer reported, with texts of at most the same lengths.

    Omits the longest entries of the metadata beyond 64, because the entries that have a meaning are short.
    """
    entries = nsmallest(_MAX_VALUES, message.metadata.items(), key=lambda entry: len(entry[0]) + len(entry[1]))
    return error_class(message.code, message.reason)(
        message.message[:_MAX_MESSAGE_BYTES],
        reason=message.reason[:_MAX_VALUE_BYTES],
        metadata={name[:_MAX_VALUE_BYTES]: text[:_MAX_VALUE_BYTES] for name, text in entries},
        facts=_facts_from_wire(message.facts),
        retry_after_s=message.retry_after_s if message.HasField("retry_after_s") else None,
    )
