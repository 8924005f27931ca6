"""Messages as plain data, for --json: every field by its name, enums as the words that people see."""

from collections.abc import Sequence
from typing import Any, cast

from google.protobuf.descriptor import EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message


def to_plain(message: Message) -> dict[str, Any]:
    """All fields, those that are not set included: as null where absence means something, else as the zero value."""
    fields: Sequence[FieldDescriptor] = cast("Any", message.DESCRIPTOR).fields
    return {field.name: _field(message, field) for field in fields}


def word_of(enum: EnumDescriptor, value: int) -> str:
    """An enum's value in lower case, without the enum's name; empty for the one that is not set."""
    found = enum.values_by_number.get(value)
    if found is None:
        return str(value)
    prefix = f"{enum.values[0].name.removesuffix('_UNSPECIFIED')}_"
    return "" if value == 0 else found.name.removeprefix(prefix).lower()


def _field(message: Message, field: FieldDescriptor) -> Any:
    if field.has_presence and not message.HasField(field.name):
        return None
    value = getattr(message, field.name)
    if _is_map(field):
        values: FieldDescriptor = cast("Any", field.message_type).fields_by_name["value"]
        return {key: _value(values, each) for key, each in value.items()}
    if field.is_repeated:
        return [_value(field, each) for each in value]
    return _value(field, value)


def _value(field: FieldDescriptor, value: Any) -> Any:
    if field.enum_type is not None:
        return word_of(field.enum_type, value)
    if field.message_type is not None:
        return to_plain(value)
    return round(value, 6) if isinstance(value, float) else value


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry
