"""Every error that Stagemesh raises on purpose, grouped by the caller's remedy.

StagemeshError
├── InvalidRequestError      INVALID_ARGUMENT     change the request
│   ├── InvalidChunkError                         fix the peer: it sent inconsistent data
│   └── InvalidPipelineError                      fix the pipeline file (has file and line)
├── NotFoundError            NOT_FOUND            name something that exists
├── ExistsError              ALREADY_EXISTS       use another id
├── NotReadyError            FAILED_PRECONDITION  wait, or fix the deployment
│   └── StaleAttemptError                         stop: a newer attempt has taken over
├── UnsupportedError         UNIMPLEMENTED        do without, or choose another engine
├── OverloadedError          RESOURCE_EXHAUSTED   retry after `retry_after_s`, or ask for less
├── DeadlineError            DEADLINE_EXCEEDED    allow more time
├── CancelledRequestError    CANCELLED            nothing: a caller asked for it
├── UnavailableError         UNAVAILABLE          retry: a peer is unreachable
└── InternalError            INTERNAL             report it

`stagemesh.rpc.error_mapping` maps each to a gRPC status: code, message and one google.rpc.ErrorInfo.
"""

from collections.abc import Mapping
from enum import IntEnum
from typing import ClassVar


class Code(IntEnum):
    """The google.rpc.Code values in use."""

    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class StagemeshError(Exception):
    """An error with a cause that a program can act on.

    `reason` is a stable UPPER_SNAKE word. `metadata` locates the error: stage, replica, edge, seq, request_id.
    """

    code: ClassVar[Code] = Code.UNKNOWN
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s

    def located(self, **where: str) -> "StagemeshError":
        """Adds entries that the metadata does not have yet. Returns the error itself."""
        self.metadata = {**where, **self.metadata}
        return self


class InvalidRequestError(StagemeshError):
    """The request is invalid, and a retry cannot succeed."""

    code = Code.INVALID_ARGUMENT
    default_reason = "INVALID_REQUEST"


class InvalidChunkError(InvalidRequestError):
    """A chunk or tensor is inconsistent."""

    default_reason = "INVALID_CHUNK"


class InvalidPipelineError(InvalidRequestError):
    """A pipeline file is invalid. The message begins with `file:line:`."""

    default_reason = "INVALID_PIPELINE"


class NotFoundError(StagemeshError):
    """The named object does not exist."""

    code = Code.NOT_FOUND
    default_reason = "NOT_FOUND"


class ExistsError(StagemeshError):
    """The id belongs to another object."""

    code = Code.ALREADY_EXISTS
    default_reason = "ALREADY_EXISTS"


class NotReadyError(StagemeshError):
    """The system is not in the state that the call needs."""

    code = Code.FAILED_PRECONDITION
    default_reason = "NOT_READY"


class StaleAttemptError(NotReadyError):
    """A newer attempt has taken over."""

    default_reason = "STALE_ATTEMPT"


class UnsupportedError(StagemeshError):
    """This engine or build does not support the operation."""

    code = Code.UNIMPLEMENTED
    default_reason = "UNSUPPORTED"


class OverloadedError(StagemeshError):
    """A limit is reached. `retry_after_s` is set if waiting helps."""

    code = Code.RESOURCE_EXHAUSTED
    default_reason = "OVERLOADED"


class DeadlineError(StagemeshError):
    """The deadline has passed."""

    code = Code.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class CancelledRequestError(StagemeshError):
    """A caller cancelled the request."""

    code = Code.CANCELLED
    default_reason = "CANCELLED"


class UnavailableError(StagemeshError):
    """A peer has terminated or is unreachable."""

    code = Code.UNAVAILABLE
    default_reason = "UNAVAILABLE"


class InternalError(StagemeshError):
    """A fault of Stagemesh or of an engine."""

    code = Code.INTERNAL
    default_reason = "INTERNAL"


_BY_CODE: Mapping[int, type[StagemeshError]] = {kind.code: kind for kind in StagemeshError.__subclasses__()}
_BY_REASON: Mapping[str, type[StagemeshError]] = {
    kind.default_reason: kind for parent in _BY_CODE.values() for kind in parent.__subclasses__()
}


def make_error(
    code: int,
    message: str,
    *,
    reason: str = "",
    metadata: Mapping[str, str] | None = None,
    retry_after_s: float | None = None,
) -> StagemeshError:
    """Builds the error that a peer reported by code and reason."""
    kind = _BY_REASON.get(reason) or _BY_CODE.get(code, InternalError)
    return kind(message, reason=reason or None, metadata=metadata, retry_after_s=retry_after_s)
