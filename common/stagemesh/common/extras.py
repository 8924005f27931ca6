"""Errors that name the extra of Stagemesh to install if a module is missing."""

import sys
from collections.abc import Generator
from contextlib import contextmanager

from stagemesh.common.errors import NotReadyError
from stagemesh.common.exit_codes import exit_code


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
