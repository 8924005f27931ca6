"""The only module that reads or sets environment variables."""

import os
from collections.abc import Mapping
from pathlib import Path

from stagemesh.common.errors import InvalidRequestError


def home() -> Path:
    """Returns the folder of models and runs: STAGEMESH_HOME, or a folder in the user's cache directory.

    Raises InvalidRequestError if STAGEMESH_HOME is not a folder.
    """
    configured = os.environ.get("STAGEMESH_HOME")
    if not configured:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stagemesh"
    folder = Path(configured)
    if folder.exists() and not folder.is_dir():
        raise _invalid("STAGEMESH_HOME", configured, "a folder, or a path where one can be created")
    return folder


def models_dir() -> Path:
    """Returns the folder into which `stagemesh models fetch` writes models, one subfolder each."""
    return home() / "models"


def runs_dir() -> Path:
    """Returns the folder in which `stagemesh up` keeps configs and logs, one subfolder a run."""
    return home() / "runs"


def find_model(name: str) -> Path | None:
    """Returns the folder or file of a model, or None if it does not exist.

    `name` is a path or the name of a model that was fetched.
    """
    for candidate in (Path(name).expanduser(), models_dir() / name):
        if candidate.exists():
            return candidate.resolve()
    return None


def zone() -> str:
    """Returns the operator's name for this host's location: STAGEMESH_ZONE, or "" if it is unset.

    Raises InvalidRequestError for characters that cannot be printed.
    """
    name = os.environ.get("STAGEMESH_ZONE", "")
    if not name.isprintable():
        raise _invalid("STAGEMESH_ZONE", name, "printable UTF-8 text")
    return name


def variables() -> dict[str, str]:
    """Returns a copy of the environment, for child processes and for ${NAME} in pipeline files."""
    return dict(os.environ)


def library_variable(name: str, default: str = "") -> str:
    """Returns a variable that belongs to a library, such as UCX_TLS. The library itself validates it."""
    return os.environ.get(name, default)


def set_library_variables(values: Mapping[str, str], *, replace: bool = False) -> None:
    """Sets variables that a library reads when it is loaded. Keeps the user's own values unless `replace`."""
    for name, value in values.items():
        if replace or name not in os.environ:
            os.environ[name] = value


def _invalid(name: str, value: str, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {value!r}; it must be {allowed}", reason="INVALID_SETTING")
