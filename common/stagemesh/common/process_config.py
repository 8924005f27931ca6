"""The JSON config file of a service process: functions that read it, write it and run the process that it describes."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from stagemesh.common.config_text import describe_mistake, without_comments
from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.exit_codes import exit_code
from stagemesh.common.process_lifecycle import run_service

STDIN = "-"
"""The name by which a process reads its config from standard input."""


class ProcessConfig(Protocol):
    """The common attribute of the configs of all service processes."""

    @property
    def parent_pid(self) -> int | None:
        """The id of the parent process. If the parent terminates, this process terminates too.

        None if this process may outlive its parent.
        """
        ...


ConfigT = TypeVar("ConfigT", bound=ProcessConfig)


def load_config(kind: type[ConfigT], path: Path) -> ConfigT:
    """Returns the config of type `kind` that the JSON file at `path` contains. The path "-" means standard input.

    Lines that begin with // are comments. Raises InvalidRequestError (INVALID_CONFIG) if the file cannot be read or is
    invalid. The message has a line for each mistake.
    """
    from_stdin = str(path) == STDIN
    name = "standard input" if from_stdin else str(path)
    try:
        text = without_comments(sys.stdin.buffer.read() if from_stdin else path.read_bytes())
    except OSError as exc:
        raise InvalidRequestError(f"{name} cannot be read: {exc.strerror}", reason="INVALID_CONFIG") from exc
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as exc:
        shown = text.decode(errors="replace")
        mistakes = [describe_mistake(error, kind, text=shown) for error in exc.errors(include_url=False)]
        raise InvalidRequestError("\n".join(f"{name}: {each}" for each in mistakes), reason="INVALID_CONFIG") from exc


def dump_config(config: ProcessConfig) -> bytes:
    """Returns a config as JSON bytes, in the format that `load_config` reads."""
    return TypeAdapter(type(config)).dump_json(config)


def run_configured(
    kind: type[ConfigT], serve: Callable[[ConfigT, asyncio.Event], Awaitable[None]], *, module: str
) -> int:
    """Runs a service process until SIGTERM or SIGINT. Returns the exit status of the process.

    Reads the process's config of type `kind` from the file that the command line option --config names. `serve`
    receives the config, and an event that is set by SIGTERM and SIGINT. `module` is the name of the Python module that
    was started.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"Run {module} until SIGTERM or SIGINT.")
    parser.add_argument(
        "--config",
        type=Path,
        required=True,
        help=f"Read the {kind.__name__} from this JSON file, or from standard input for {STDIN}. Required.",
    )
    try:
        config = load_config(kind, parser.parse_args().config)
    except InvalidRequestError as exc:
        sys.stderr.write(f"{exc.message}\n")
        return exit_code(exc)
    return run_service(partial(serve, config), parent_pid=config.parent_pid)
