"""The exit codes of the command line and of service processes. Scripts use them to decide what to do next.

docs/cli.md and `stagemesh --help` list the codes.
"""

from collections.abc import Mapping
from enum import IntEnum

from stagemesh.common.errors import StagemeshError


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
_BY_CODE: Mapping[str, ExitCode] = {
    "INVALID_ARGUMENT": ExitCode.USAGE,
    "NOT_FOUND": ExitCode.NOT_FOUND,
    "UNAVAILABLE": ExitCode.UNAVAILABLE,
    "DEADLINE_EXCEEDED": ExitCode.TIMEOUT,
    "ALREADY_EXISTS": ExitCode.REFUSED,
    "FAILED_PRECONDITION": ExitCode.REFUSED,
    "PERMISSION_DENIED": ExitCode.REFUSED,
    "RESOURCE_EXHAUSTED": ExitCode.REFUSED,
    "UNAUTHENTICATED": ExitCode.REFUSED,
}


def exit_code(error: StagemeshError) -> ExitCode:
    """Returns the exit code of a process that ends with `error`."""
    return _BY_CODE.get(error.code.name, ExitCode.FAILED)
