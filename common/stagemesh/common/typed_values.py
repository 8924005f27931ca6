"""Small values with a type: options of requests and metadata of packets."""

from collections.abc import Mapping
from typing import TypeAlias

from stagemesh.v1 import tensor_pb2

Value: TypeAlias = int | float | bool | str


def fill_message(message: tensor_pb2.TypedValue, value: Value) -> None:
    """Sets the value of a protobuf message.

    Raises TypeError if the value has another type, and ValueError if an integer does not fit into 64 bits.
    """
    match value:
        case bool():
            message.flag = value
        case int():
            message.integer = value
        case float():
            message.number = value
        case str():
            message.text = value
        case _:
            raise TypeError(f"{value!r} is a {type(value).__name__}; use bool, int, float or str")


def to_messages(values: Mapping[str, Value]) -> dict[str, tensor_pb2.TypedValue]:
    """Converts values to their protobuf messages, by name. Raises the errors of `fill_message`."""
    messages = {name: tensor_pb2.TypedValue() for name in values}
    for name, value in values.items():
        fill_message(messages[name], value)
    return messages


def from_message(message: tensor_pb2.TypedValue) -> Value | None:
    """Converts a protobuf message to its value. Returns None if no value is set."""
    kind = message.WhichOneof("kind")
    return None if kind is None else getattr(message, kind)
