"""The JSON config file of a service process: reading it, writing it, and running the process that it describes."""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.process_lifecycle import run_service

_EXIT_USAGE = 2


class ProcessConfig(Protocol):
    """The attribute that the configs of all service processes have."""

    @property
    def parent_pid(self) -> int | None:
        """The id of the parent process with which this process terminates, or None if it may outlive its parent."""
        ...


ConfigT = TypeVar("ConfigT", bound=ProcessConfig)


def load_config(kind: type[ConfigT], path: Path) -> ConfigT:
    """Returns the config of type `kind` in the JSON file at `path`.

    Raises InvalidRequestError (INVALID_CONFIG) if the file cannot be read or is invalid. The message names the invalid
    field.
    """
    try:
        return TypeAdapter(kind).validate_json(path.read_bytes())
    except ValidationError as exc:
        raise InvalidRequestError(f"{path}: {exc}", reason="INVALID_CONFIG") from exc
    except OSError as exc:
        raise InvalidRequestError(f"{path} cannot be read: {exc.strerror}", reason="INVALID_CONFIG") from exc


def dump_config(config: ProcessConfig) -> bytes:
    """Returns a config as JSON, in the format that `load_config` reads."""
    return TypeAdapter(type(config)).dump_json(config)


def run_configured(
    kind: type[ConfigT], serve: Callable[[ConfigT, asyncio.Event], Awaitable[None]], *, module: str
) -> int:
    """Runs the process that the file of the command line option --config describes, until SIGTERM or SIGINT.

    `serve` receives the config and the event that SIGTERM and SIGINT set. `module` is the module that the command line
    runs. Returns the exit status of the process.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=f"Run {module} until SIGTERM or SIGINT.")
    parser.add_argument(
        "--config", type=Path, required=True, help=f"Read the {kind.__name__} from this JSON file. Required."
    )
    try:
        config = load_config(kind, parser.parse_args().config)
    except InvalidRequestError as exc:
        sys.stderr.write(f"{exc.message}\n")
        return _EXIT_USAGE
    return run_service(partial(serve, config), parent_pid=config.parent_pid)
