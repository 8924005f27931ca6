"""Changes the level of this process's logs, as operators ask by RPC."""

from typing import TypeAlias

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.logs import LEVELS, set_level
from stagemesh.v1 import control_pb2

_Level: TypeAlias = "control_pb2.LogLevel.ValueType"

_WIRE = (
    control_pb2.LOG_LEVEL_DEBUG,
    control_pb2.LOG_LEVEL_INFO,
    control_pb2.LOG_LEVEL_WARNING,
    control_pb2.LOG_LEVEL_ERROR,
)


def set_log_level(level: _Level, logger: str) -> _Level:
    """Sets the level of a logger of this process, and returns the level that it had. "" stands for all of Stagemesh.

    Raises InvalidRequestError for an unknown level, and NotFoundError (UNKNOWN_LOGGER) for an unknown logger.
    """
    if level not in _WIRE:
        raise InvalidRequestError(f"unknown level {level}; levels: {', '.join(map(control_pb2.LogLevel.Name, _WIRE))}")
    previous = set_level(LEVELS[_WIRE.index(level)], logger=logger)
    # A library may have set a level between two of these, or above all.
    return _WIRE[max(0, sum(previous >= each for each in LEVELS) - 1)]
