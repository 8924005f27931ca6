"""The only module that reads the environment."""

import os
from pathlib import Path


def home() -> Path:
    """Where models and runs are kept: STAGEMESH_HOME, else a folder of the user's cache directory."""
    configured = os.environ.get("STAGEMESH_HOME")
    if configured:
        return Path(configured)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stagemesh"


def models_dir() -> Path:
    """Where `stagemesh models fetch` puts models, one folder each."""
    return home() / "models"


def runs_dir() -> Path:
    """Where `stagemesh up` keeps configs and logs, one folder a run."""
    return home() / "runs"


def find_model(name: str) -> Path | None:
    """The folder or file of a model: a path as it is, or the name of one that was fetched; None where missing."""
    for candidate in (Path(name).expanduser(), models_dir() / name):
        if candidate.exists():
            return candidate.resolve()
    return None


def zone() -> str:
    """Where this host stands, as its operator calls it: STAGEMESH_ZONE; empty for nowhere in particular."""
    return os.environ.get("STAGEMESH_ZONE", "")


def variables() -> dict[str, str]:
    """The variables that a pipeline file may refer to as ${NAME}."""
    return dict(os.environ)
