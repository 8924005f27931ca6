"""Logging to stderr, as text or as JSON. Each record names the stage, the replica, the request and the attempt.

STAGEMESH_LOG_FORMAT ("text" or "json") and STAGEMESH_LOG_LEVEL set the format and the level of a process. The level can
change while the process runs (`set_level`).
"""

import logging
import secrets
from collections.abc import Mapping
from contextvars import ContextVar

from stagemesh.common.errors import NotFoundError
from stagemesh.common.process import settings

LEVELS = tuple(getattr(logging, name) for name in settings.LOG_LEVELS)
"""The levels that a process can have, the lowest first, as numbers of the module logging."""

_FORMAT = "%(asctime)s %(levelname)s %(stage)s/%(replica)s %(request_id)s/%(attempt)s %(name)s: %(message)s"
_NAMES = ("stage", "replica", "request_id", "attempt")
_ABSENT = "-"
_OWN = "stagemesh"
_log = logging.getLogger(__name__)
_process: dict[str, str] = {}
_where: ContextVar[Mapping[str, str]] = ContextVar("stagemesh_log_where")


def bind_process_log_context(**where: str) -> None:
    """Adds values such as `stage` and `replica` to all later log records of this process, those of threads included."""
    _process.update(where)


def bind_log_context(**where: str) -> None:
    """Adds values such as `stage` and `request_id` to later log records of this task and of its child tasks."""
    _where.set({**_where.get({}), **where})


def log_cause(exc: Exception, *, what: str) -> str:
    """Logs the error of a library or of the system, whose text may contain addresses and paths.

    `what` is what failed. Returns a text for clients, which refers to the log's record.
    """
    reference = secrets.token_hex(4)
    _log.warning("%s failed (%s): %s: %s", what, reference, type(exc).__name__, exc)
    return f"the service's log has the cause ({reference})"


class LogContextFilter(logging.Filter):
    """A logging filter that adds the attributes `stage`, `replica`, `request_id` and `attempt` to each record.

    A record lacks the attributes that are not bound, or they are `absent` if that is not None.
    """

    def __init__(self, *, absent: str | None = None) -> None:
        super().__init__()
        self._absent = {} if absent is None else dict.fromkeys(_NAMES, absent)

    def filter(self, record: logging.LogRecord) -> bool:
        record.__dict__.update({**self._absent, **_process, **_where.get({})})
        return True


def configure_logging() -> None:
    """Replaces the root logger's handlers with one handler, which writes to stderr.

    Raises InvalidRequestError (INVALID_SETTING) if an environment variable has an unknown value.
    """
    handler = logging.StreamHandler()
    if settings.log_format() == "json":
        from pythonjsonlogger.json import JsonFormatter

        handler.addFilter(LogContextFilter())
        renamed = {"levelname": "level", "name": "logger", "exc_info": "exception"}
        fields = ["levelname", "name", "message"]
        handler.setFormatter(JsonFormatter(fields, rename_fields=renamed, timestamp="time", json_ensure_ascii=False))
    else:
        handler.addFilter(LogContextFilter(absent=_ABSENT))
        handler.setFormatter(logging.Formatter(_FORMAT))
    logging.basicConfig(level=settings.log_level(), handlers=[handler], force=True)


def set_level(level: int, *, logger: str = "") -> int:
    """Sets the level of a logger and of those below it, and returns the level that it had.

    `logger` is a name such as "stagemesh.connectors" or "vllm", or empty for all of Stagemesh. Raises NotFoundError
    (UNKNOWN_LOGGER) if this process has no such logger.
    """
    name = logger or _OWN
    known = [each for each in logging.root.manager.loggerDict if each == name or each.startswith(f"{name}.")]
    if not known:
        tops = sorted({each.partition(".")[0] for each in logging.root.manager.loggerDict})
        raise NotFoundError(
            f"this process has no logger {name!r}; it has loggers below {', '.join(tops)}", reason="UNKNOWN_LOGGER"
        )
    found = logging.getLogger(name)
    previous = found.getEffectiveLevel()
    found.setLevel(level)
    return previous
