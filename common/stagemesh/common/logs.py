"""Logging: one line on stderr for each record, with the stage and the request to which it belongs."""

import logging
from collections.abc import Mapping
from contextvars import ContextVar

_FORMAT = "%(asctime)s %(levelname)s %(stage)s %(request_id)s %(name)s: %(message)s"
_ABSENT = "-"
_where: ContextVar[Mapping[str, str] | None] = ContextVar("stagemesh_log_where", default=None)


def bind_log_context(**where: str) -> None:
    """Sets `stage` and `request_id` for all later log lines of this task and of the tasks that it creates."""
    _where.set({**log_context(), **where})


def log_context() -> Mapping[str, str]:
    """Returns the values that are bound in this task."""
    return _where.get() or {}


class LogContextFilter(logging.Filter):
    """Gives every record the attributes `stage` and `request_id`, or "-" if none is bound."""

    def filter(self, record: logging.LogRecord) -> bool:
        where = log_context()
        record.stage = where.get("stage", _ABSENT)
        record.request_id = where.get("request_id", _ABSENT)
        return True


def configure_logging(*, level: int = logging.INFO) -> None:
    """Sends the records of all loggers to stderr in one format."""
    handler = logging.StreamHandler()
    handler.addFilter(LogContextFilter())
    handler.setFormatter(logging.Formatter(_FORMAT))
    logging.basicConfig(level=level, handlers=[handler], force=True)
