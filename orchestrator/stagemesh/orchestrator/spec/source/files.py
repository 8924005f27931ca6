"""Finds pipeline files: shipped ones by name, others by path."""

from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

from stagemesh.common.errors import NotFoundError


class Source(NamedTuple):
    """A pipeline file."""

    path: Path
    shipped: bool


def _shipped_dir() -> Path:
    return Path(str(files("stagemesh.orchestrator"))) / "pipelines"


def shipped_pipelines() -> tuple[str, ...]:
    """The names of the pipelines that come with Stagemesh."""
    return tuple(sorted(path.stem for path in _shipped_dir().glob("*.yaml")))


def find_source(name_or_path: str) -> Source:
    """The file of a shipped pipeline, or at a path; raises NotFoundError naming those shipped."""
    if name_or_path in shipped_pipelines():
        return Source(_shipped_dir() / f"{name_or_path}.yaml", shipped=True)
    path = Path(name_or_path).expanduser()
    if path.is_file():
        return Source(path, shipped=False)
    close = get_close_matches(name_or_path, shipped_pipelines(), n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; shipped: {', '.join(shipped_pipelines())}"
    raise NotFoundError(
        f"unknown pipeline {name_or_path!r}: neither shipped nor a file{hint} (or give the path of a .yaml file)",
        reason="UNKNOWN_PIPELINE",
    )
