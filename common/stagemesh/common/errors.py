"""The errors that Stagemesh raises deliberately, grouped by the caller's remedy, and the exit codes of programs."""

import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import IntEnum
from pathlib import PurePath
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
    details by name, for example `stage`, `replica`, `edge`, `seq` or `request_id`. `facts` has the numbers by which
    programs recover, by their names in the message ErrorFacts. `retry_after_s` is the number of seconds after which a
    retry may succeed, at most a day, or None if that time is unknown.
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
        facts: Mapping[str, int] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason or self.code.name
        self.metadata = dict(metadata or {})
        self.facts = dict(facts or {})
        self.retry_after_s = None if retry_after_s is None else min(max(0.0, retry_after_s), 86_400.0)

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


class ExitCode(IntEnum):
    """The exit codes of all programs of Stagemesh. 0 means success."""

    FAILED = 1
    """Any other failure, for example a defect, an unsupported operation or a cancelled request."""
    USAGE = 2
    """The command line, a file that it names, or the request is invalid. The same command fails again."""
    NOT_FOUND = 3
    """The object that the command names does not exist."""
    UNAVAILABLE = 4
    """The server or a stage is unreachable or stopping. A later attempt may succeed."""
    TIMEOUT = 5
    """The time limit of the command or of the request has passed."""
    REFUSED = 6
    """The caller lacks a permission, a load limit is reached, or the system is not in the required state."""
    INTERRUPTED = 130
    """Ctrl-C ended the command."""


# By name, because the error of a peer may have a code that no class of this process has.
_EXIT_CODES: Mapping[str, ExitCode] = {
    "INVALID_ARGUMENT": ExitCode.USAGE,
    "NOT_FOUND": ExitCode.NOT_FOUND,
    "UNAVAILABLE": ExitCode.UNAVAILABLE,
    "DEADLINE_EXCEEDED": ExitCode.TIMEOUT,
    **dict.fromkeys(("ALREADY_EXISTS", "FAILED_PRECONDITION", "PERMISSION_DENIED"), ExitCode.REFUSED),
    **dict.fromkeys(("RESOURCE_EXHAUSTED", "UNAUTHENTICATED"), ExitCode.REFUSED),
}


def exit_code(error: StagemeshError) -> ExitCode:
    """Returns the exit code of a process that ends with `error`."""
    return _EXIT_CODES.get(error.code.name, ExitCode.FAILED)


@contextmanager
def needs_extra(*extras: str, of: str) -> Generator[None]:
    """Raises NotReadyError (MISSING_MODULE) if the `with` block imports a module that is not installed.

    `of` is the part of Stagemesh that needs the module. Any one of the `extras` installs the module. A missing module
    of Stagemesh itself is a defect, and remains an ImportError.
    """
    try:
        yield
    except ImportError as exc:
        module = exc.name or str(exc)
        if module.partition(".")[0] == "stagemesh":
            raise
        remedy = " or ".join(f"pip install 'stagemesh[{extra}]'" for extra in extras)
        raise NotReadyError(f"{of} needs the module {module}; run: {remedy}", reason="MISSING_MODULE") from exc


@contextmanager
def exit_without_extra(*extras: str, of: str) -> Generator[None]:
    """Prints the error of `needs_extra` to stderr and exits with its code if the `with` block raises it.

    Use it for the imports of a program that is started as a process.
    """
    try:
        with needs_extra(*extras, of=of):
            yield
    except NotReadyError as exc:
        sys.stderr.write(f"error: {exc.message}\n")
        sys.exit(exit_code(exc))


@contextmanager
def file_access(problem: str, *, reason: str, remedy: str = "") -> Generator[None]:
    """Raises InvalidRequestError with this reason if the `with` block raises OSError.

    Its message is `problem`, for example "cannot read FILE", a colon, the cause in the system's words, and `remedy`.
    """
    try:
        yield
    except OSError as exc:
        raise InvalidRequestError(f"{problem}: {exc.strerror or exc}{remedy}", reason=reason) from exc


def writing(path: PurePath, *, remedy: str = "") -> AbstractContextManager[None]:
    """Raises InvalidRequestError (CANNOT_WRITE) if the `with` block, which writes the file `path`, raises OSError."""
    return file_access(f"{path} cannot be written", reason="CANNOT_WRITE", remedy=remedy)


ENGINE_DIED = "ENGINE_DIED"
"""The reason of the error with which a stage ends whose engine has failed or hangs."""
