"""Locates pipeline files: built-in pipelines by name, and other pipelines by path."""

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from stagemesh.common.errors import NotFoundError


class Source(NamedTuple):
    """The location of a pipeline file, and whether it is a built-in pipeline."""

    path: Path
    built_in: bool


def _built_in_dir() -> Path:
    return Path(str(files("stagemesh.orchestrator"))) / "pipelines"


def built_in_pipelines() -> tuple[str, ...]:
    """Returns the names of the built-in pipelines in alphabetical order."""
    return tuple(sorted(path.stem for path in _built_in_dir().glob("*.yaml")))


def find_source(name_or_path: str) -> Source:
    """Returns the file of the built-in pipeline with this name, or the file at this path.

    Raises NotFoundError (UNKNOWN_PIPELINE) if there is neither a built-in pipeline nor a file.
    """
    if name_or_path in built_in_pipelines():
        return Source(_built_in_dir() / f"{name_or_path}.yaml", built_in=True)
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return Source(path, built_in=False)
    close = get_close_matches(name_or_path, built_in_pipelines(), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; built-in: {', '.join(built_in_pipelines())}"
    raise NotFoundError(
        f"unknown pipeline {name_or_path!r}: neither built-in nor a file{hint} (or give the path of a .yaml file)",
        reason="UNKNOWN_PIPELINE",
    )
