"""Errors of user code: of the functions and transforms that a package registers."""

import logging
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass

from stagemesh.common.errors import InternalError, StagemeshError

_log = logging.getLogger(__name__)
_MAX_TEXT = 500
"""The maximum length of an exception's text in an error, in characters."""


@dataclass(frozen=True)
class UserErrors:
    """Describes exceptions of user code for clients, and logs their tracebacks."""

    details: bool = False
    """Whether clients receive the exception's text, and the place in the user's code that raised it."""
    log: str = ""
    """The path of the log, if clients may know it."""

    def describe(self, what: str, exc: BaseException, *, module: str = "") -> str:
        """Logs an exception. Returns the message for the client.

        Args:
            what: What raised the exception, for example "function upper".
            exc: The exception.
            module: The name of a module of the user's package. Frames of this package are the user's own.
        """
        _log.error("%s raised an exception", what, exc_info=exc)
        raised = type(exc).__name__
        if self.details:
            raised += f": {_shortened(str(exc))}{_place(exc, package=module.partition('.')[0])}"
        return f"{what} raised {raised}; the log {self.log or 'of this replica'} has the traceback"


@dataclass(frozen=True)
class UserCode:
    """A function or a transform of a package. Its errors name it, as clients receive them."""

    name: str
    """For example "function upper of stage shout"."""
    module: str
    """The module of the user's package that contains it."""
    errors: UserErrors
    function: str = ""
    """The name of the function, or empty for a transform."""
    edge: str = ""
    """The edge of the transform, or empty for a function."""

    def to_stagemesh_error(self, exc: BaseException) -> StagemeshError:
        """Returns the error for an exception that the code has raised, and logs its traceback."""
        if isinstance(exc, StagemeshError):
            return exc
        return self._error(self.errors.describe(self.name, exc, module=self.module), reason="ENGINE_ERROR")

    @contextmanager
    def converted_errors(self) -> Generator[None]:
        """Raises the error for an exception that the code raises in the block."""
        try:
            yield
        except (Exception, SystemExit) as exc:
            raise self.to_stagemesh_error(exc) from exc

    def invalid_result(self, problem: str, *, wanted: str) -> InternalError:
        """Returns the error for a result of a wrong type. `wanted` says which type is right."""
        return self._error(f"{self.name} returned {problem}; return {wanted}", reason="INVALID_RESULT")

    def _error(self, text: str, *, reason: str) -> InternalError:
        return InternalError(
            text, reason=reason, metadata={"edge": self.edge} if self.edge else {"function": self.function}
        )


def _shortened(text: str) -> str:
    return text if len(text) <= _MAX_TEXT else f"{text[:_MAX_TEXT]}…"


def _place(exc: BaseException, *, package: str) -> str:
    """Returns the place in the user's package that raised an exception, in parentheses, or "" if there is none.

    It is the last frame of the package, or the last frame at all if none is of the package.
    """
    frames = list(traceback.walk_tb(exc.__traceback__))
    own = [each for each in frames if str(each[0].f_globals.get("__name__", "")).partition(".")[0] == package]
    for frame, line in reversed(own or frames):
        return f" ({frame.f_code.co_filename}, line {line}, in {frame.f_code.co_name})"
    return ""
