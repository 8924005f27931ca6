"""The errors that Stagemesh raises deliberately, grouped by the caller's remedy.

StagemeshError
├── InvalidRequestError      INVALID_ARGUMENT     change the request
│   ├── InvalidChunkError                         fix the peer: it sent inconsistent data
│   └── InvalidPipelineError                      fix the pipeline file at the reported line
├── UnauthenticatedError     UNAUTHENTICATED      present valid credentials
├── PermissionDeniedError    PERMISSION_DENIED    use credentials whose role allows the call
├── NotFoundError            NOT_FOUND            name an object that exists
├── ExistsError              ALREADY_EXISTS       use another id
├── NotReadyError            FAILED_PRECONDITION  wait, or fix the deployment
│   └── StaleAttemptError                         stop: a newer attempt has taken over
├── UnsupportedError         UNIMPLEMENTED        avoid the feature, or choose another engine
├── OverloadedError          RESOURCE_EXHAUSTED   retry after `retry_after_s`, or send a smaller request
├── ReplacedError            ABORTED              stop: a later call has taken over
├── DeadlineError            DEADLINE_EXCEEDED    allow more time
├── CancelledRequestError    CANCELLED            none: a caller cancelled the request
├── UnavailableError         UNAVAILABLE          retry: a peer is unreachable
└── InternalError            INTERNAL             report it

`stagemesh.rpc.error_mapping` maps each error to a gRPC status: code, message and one google.rpc.ErrorInfo.
`protos/stagemesh/v1/errors.proto` is the catalogue of all reasons, from which docs/errors.md is generated.
"""

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import ClassVar, NamedTuple


class Code(IntEnum):
    """The status codes of google.rpc.Code that Stagemesh uses."""

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
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class StagemeshError(Exception):
    """Base class of all Stagemesh errors. Programs can react to `reason` without parsing the message.

    `reason` is a name of the enum ErrorReason in `errors.proto`, without the prefix `ERROR_REASON_`. `metadata` has
    details by name, for example `stage`, `replica`, `edge`, `seq` or `request_id`. `retry_after_s` is the number of
    seconds after which a retry may succeed, or None if that time is unknown.
    """

    code: ClassVar[Code] = Code.UNKNOWN
    default_reason: ClassVar[str] = ""
    """The default of `reason`. If it is empty, the default is the name of the error's code.

    If it is empty, code that raises the error must name a reason. `rpc.error_mapping` may omit the reason, because the
    statuses of gRPC and of proxies have none.
    """

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
        self.reason = reason or self.default_reason or self.code.name
        self.metadata = dict(metadata or {})
        self.retry_after_s = retry_after_s

    def located(self, **where: str) -> "StagemeshError":
        """Adds the entries of `where` to `metadata`. Existing entries are not replaced. Returns this error."""
        self.metadata = {**where, **self.metadata}
        return self


class InvalidRequestError(StagemeshError):
    """Raised if a request is invalid. A retry of the same request fails again."""

    code = Code.INVALID_ARGUMENT
    default_reason = "INVALID_REQUEST"


class InvalidChunkError(InvalidRequestError):
    """Raised if a chunk or tensor from a peer or client is inconsistent or exceeds a limit."""

    default_reason = "INVALID_CHUNK"


class Finding(NamedTuple):
    """A mistake in a pipeline file."""

    place: str
    """The place of the mistake, such as "file:line" or "--set KEY"."""
    line: int
    """The line in the file, from 1. 0 if the value is not in the file."""
    key: str
    """The dotted key of the value, for example "edges.0.connector". Empty if it is the whole file."""
    message: str
    """The mistake and its remedy."""


class InvalidPipelineError(InvalidRequestError):
    """Raised if a pipeline file is invalid. The message begins with `file:line:`."""

    default_reason = "INVALID_PIPELINE"
    findings: Sequence[Finding] = ()
    """Every mistake in the file. Empty if the error comes from another process."""


class UnauthenticatedError(StagemeshError):
    """Raised if the caller's credentials are missing, invalid or expired. A retry with the same credentials fails."""

    code = Code.UNAUTHENTICATED
    default_reason = "UNAUTHENTICATED"


class PermissionDeniedError(StagemeshError):
    """Raised if the caller's credentials do not permit the call. A retry with the same credentials fails again."""

    code = Code.PERMISSION_DENIED
    default_reason = "PERMISSION_DENIED"


class NotFoundError(StagemeshError):
    """Raised if the object that a call names does not exist."""

    code = Code.NOT_FOUND


class ExistsError(StagemeshError):
    """Raised if an object with the same id already exists."""

    code = Code.ALREADY_EXISTS


class NotReadyError(StagemeshError):
    """Raised if the system is not in the state that the call requires."""

    code = Code.FAILED_PRECONDITION
    default_reason = "NOT_READY"


class StaleAttemptError(NotReadyError):
    """Raised if a newer attempt has replaced the caller's attempt."""

    default_reason = "STALE_ATTEMPT"


class UnsupportedError(StagemeshError):
    """Raised if the engine, or this installation of Stagemesh, does not support the operation."""

    code = Code.UNIMPLEMENTED
    default_reason = "UNSUPPORTED"


class OverloadedError(StagemeshError):
    """Raised if a load limit has been reached, or if the request is too large for a limit.

    `retry_after_s` is set if a later retry may succeed.
    """

    code = Code.RESOURCE_EXHAUSTED
    default_reason = "OVERLOADED"


class ReplacedError(StagemeshError):
    """Raised if a later call has taken the place of this call."""

    code = Code.ABORTED


class DeadlineError(StagemeshError):
    """Raised if the deadline of a request or call has passed."""

    code = Code.DEADLINE_EXCEEDED
    default_reason = "DEADLINE_EXCEEDED"


class CancelledRequestError(StagemeshError):
    """Raised if a caller cancelled the request."""

    code = Code.CANCELLED
    default_reason = "CANCELLED"


class UnavailableError(StagemeshError):
    """Raised if a peer has terminated or is unreachable."""

    code = Code.UNAVAILABLE


class InternalError(StagemeshError):
    """Raised if a defect in Stagemesh or in an engine caused the failure."""

    code = Code.INTERNAL
    default_reason = "INTERNAL"


_BY_CODE: Mapping[int, type[StagemeshError]] = {kind.code: kind for kind in StagemeshError.__subclasses__()}
_BY_REASON: Mapping[str, type[StagemeshError]] = {
    kind.default_reason: kind for parent in _BY_CODE.values() for kind in parent.__subclasses__()
}


def error_class(code: int, reason: str = "") -> type[StagemeshError]:
    """Returns the StagemeshError subclass for an error that a peer reported.

    Returns the class that matches `reason`. If there is none, returns the class that matches `code`. If there is none
    either, returns InternalError.
    """
    return _BY_REASON.get(reason) or _BY_CODE.get(code, InternalError)
