"""Logging to stderr, with one line for each record. Each line names the record's stage and request."""

import logging
from collections.abc import Mapping
from contextvars import ContextVar

_FORMAT = "%(asctime)s %(levelname)s %(stage)s %(request_id)s %(name)s: %(message)s"
_ABSENT = "-"
_where: ContextVar[Mapping[str, str] | None] = ContextVar("stagemesh_log_where", default=None)


def bind_log_context(**where: str) -> None:
    """Adds values such as `stage` and `request_id` to later log records of this task and of its child tasks."""
    _where.set({**log_context(), **where})


def log_context() -> Mapping[str, str]:
    """Returns the values that `bind_log_context` has set for this task. The mapping is empty if no value is set."""
    return _where.get() or {}


class LogContextFilter(logging.Filter):
    """A logging filter that adds the attributes `stage` and `request_id` to each record.

    An attribute is "-" if `bind_log_context` has not set its value.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        where = log_context()
        record.stage = where.get("stage", _ABSENT)
        record.request_id = where.get("request_id", _ABSENT)
        return True


def configure_logging(*, level: int = logging.INFO) -> None:
    """Replaces the root logger's handlers with one handler, which writes records of at least `level` to stderr."""
    handler = logging.StreamHandler()
    handler.addFilter(LogContextFilter())
    handler.setFormatter(logging.Formatter(_FORMAT))
    logging.basicConfig(level=level, handlers=[handler], force=True)
