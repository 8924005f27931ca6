"""Settings from environment variables. No other module reads or sets environment variables."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from stagemesh.common.errors import InvalidRequestError

COMPUTE_VARIABLES: Mapping[str, str] = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
"""The variables of a process that computes with torch, unless the user has set them.

Models are local folders, and stages share a machine: with more threads in each stage, they would compete for the cores.
"""
LOG_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR")
"""The levels of logs, the lowest first."""


def home() -> Path:
    """Returns the folder for models and runs: STAGEMESH_HOME, or by default `stagemesh` in the user's cache folder.

    Raises InvalidRequestError if STAGEMESH_HOME exists but is not a folder.
    """
    configured = os.environ.get("STAGEMESH_HOME")
    if not configured:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stagemesh"
    folder = Path(configured)
    if folder.exists() and not folder.is_dir():
        raise _invalid("STAGEMESH_HOME", configured, "a folder, or a path where one can be created")
    return folder


def models_dir() -> Path:
    """Returns the folder in which `stagemesh models fetch` creates one subfolder for each model."""
    return home() / "models"


def runs_dir() -> Path:
    """Returns the folder in which `stagemesh up` creates one subfolder for the configs and logs of each run."""
    return home() / "runs"


def spool_dir() -> Path:
    """Returns the folder in which services keep copies of remote files while they read them."""
    return home() / "spool"


def jobs_database(pipeline: str) -> Path:
    """Returns the path of the SQLite file in which job servers keep the jobs of a pipeline by default."""
    return home() / "jobs" / f"{pipeline}.sqlite3"


def voices_dir() -> Path:
    """Returns the folder in which the gateway of `stagemesh up` stores the voices that callers create."""
    return home() / "voices"


def find_model(name: str) -> Path | None:
    """Returns the absolute path of a model's folder or file, or None if no such model exists.

    `name` is either a path or the name of a fetched model.
    """
    for candidate in (Path(name).expanduser(), models_dir() / name):
        if candidate.exists():
            return candidate.resolve()
    return None


def zone() -> str:
    """Returns the operator's name for this host's location: the value of STAGEMESH_ZONE, or "" if it is not set.

    Raises InvalidRequestError if the value contains unprintable characters.
    """
    name = os.environ.get("STAGEMESH_ZONE", "")
    if not name.isprintable():
        raise _invalid("STAGEMESH_ZONE", name, "printable UTF-8 text")
    return name


def log_format() -> str:
    """Returns the format of logs: the value of STAGEMESH_LOG_FORMAT, "text" or "json", by default "text".

    Raises InvalidRequestError (INVALID_SETTING) for another value.
    """
    return _one_of("STAGEMESH_LOG_FORMAT", ("text", "json"))


def log_level() -> str:
    """Returns the level of logs: the value of STAGEMESH_LOG_LEVEL in capital letters, by default "INFO".

    Raises InvalidRequestError (INVALID_SETTING) if it is none of LOG_LEVELS.
    """
    return _one_of("STAGEMESH_LOG_LEVEL", LOG_LEVELS, default="INFO")


def exports_traces() -> bool:
    """Returns whether the environment variables of OpenTelemetry name a collector of traces.

    Raises InvalidRequestError (INVALID_SETTING) if they select another protocol than OTLP over gRPC.
    """
    if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or os.environ.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    if not any(os.environ.get(f"OTEL_EXPORTER_OTLP_{each}ENDPOINT") for each in ("TRACES_", "")):
        return False
    _one_of("OTEL_TRACES_EXPORTER", ("otlp",))
    for each in ("TRACES_", ""):
        _one_of(f"OTEL_EXPORTER_OTLP_{each}PROTOCOL", ("grpc",))
    return True


def variables() -> dict[str, str]:
    """Returns a copy of all environment variables, for use in child processes and for ${NAME} in pipeline files."""
    return dict(os.environ)


def library_variable(name: str, default: str = "") -> str:
    """Returns the value of the environment variable `name`, or `default` if the variable is not set.

    The variable, for example UCX_TLS, belongs to a library. The library validates the value, not Stagemesh.
    """
    return os.environ.get(name, default)


def torch_threads() -> int:
    """Returns the number of threads with which torch computes on a CPU: OMP_NUM_THREADS, or 1 if it has no number.

    The variable may list a number for each level of nested loops. The first number applies.
    """
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(1, int(first)) if first.isdecimal() else int(COMPUTE_VARIABLES["OMP_NUM_THREADS"])


def set_library_variables(values: Mapping[str, str], *, replace: bool = False) -> None:
    """Sets environment variables that a library reads when the library is loaded.

    A variable that is already set keeps its value, unless `replace` is True.
    """
    for name, value in values.items():
        if replace or name not in os.environ:
            os.environ[name] = value


def replace_variables(values: Mapping[str, str]) -> None:
    """Replaces all environment variables, for example in a forked process with those of its parent."""
    os.environ.clear()
    os.environ.update(values)


def _one_of(name: str, allowed: Sequence[str], *, default: str = "") -> str:
    value = os.environ.get(name) or default or allowed[0]
    found = next((each for each in allowed if each.lower() == value.lower()), None)
    if found is None:
        raise _invalid(name, value, " or ".join(allowed))
    return found


def _invalid(name: str, value: str, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{name} is {value!r}; it must be {allowed}", reason="INVALID_SETTING")
