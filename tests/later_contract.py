"""A later version of the contract, in a descriptor pool of its own, with which tests talk to today's version.

Every message has a further field, `later_note`. The oneof of every message whose kind matters has a further kind,
`later`. Every enum has a further value, LATER.
"""

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message

from stagemesh.v1 import admin_pb2

LATER = 900
_NOTE, _KIND = 2000, 1000
_WITH_KINDS = {
    "ChunkPolicy",
    "PutItem",
    "PutReply",
    "Chunk",
    "Tensor",
    "ExecuteStepsRequest",
    "StepMessage",
    "ExecuteStepResponse",
    "GenerateResponse",
    "ConverseRequest",
    "ConverseResponse",
    "InputAppend",
    "Output",
    "Input",
    "Part",
    "MediaFile",
    "TypedValue",
    "Sampling",
}
_WITHOUT_NOTES = {"Parameters", "StageParameters", "Sampling"}
"""The messages none of whose fields may be ignored."""
_Field = descriptor_pb2.FieldDescriptorProto


def later_class(name: str) -> Any:
    """Returns the later version of a message class of stagemesh.v1."""
    return message_factory.GetMessageClass(_POOL.FindMessageTypeByName(f"stagemesh.v1.{name}"))


def later(message: Message) -> Any:
    """Returns the later version of a message, with a note in each of its messages."""
    noted = later_class(message.DESCRIPTOR.name).FromString(message.SerializeToString())
    _add_notes(noted)
    return noted


def today(message: Any, kind: type[Message]) -> Any:
    """Returns what today's version reads of a later message."""
    return kind.FromString(message.SerializeToString())


def _add_notes(message: Any) -> None:
    if "later_note" not in message.DESCRIPTOR.fields_by_name:
        return
    if message.DESCRIPTOR.name not in _WITHOUT_NOTES:
        message.later_note = "unknown today"
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for each in value if field.is_repeated else (value,):
            _add_notes(each)


def _add(pool: descriptor_pool.DescriptorPool, file: FileDescriptor, added: set[str]) -> None:
    """Adds the later version of a file to the pool, after the files that it imports."""
    if file.name in added:
        return
    added.add(file.name)
    for imported in file.dependencies:
        _add(pool, imported, added)
    described = descriptor_pb2.FileDescriptorProto()
    file.CopyToProto(described)
    if file.package == "stagemesh.v1":
        _extend(described)
    pool.Add(described)


def _extend(file: descriptor_pb2.FileDescriptorProto) -> None:
    for enum in file.enum_type:
        enum.value.add(name=f"{enum.name.upper()}_LATER", number=LATER)
    for message in file.message_type:
        message.field.add(name="later_note", number=_NOTE, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL)
        if message.name in _WITH_KINDS:
            message.field.add(
                name="later", number=_KIND, type=_Field.TYPE_STRING, label=_Field.LABEL_OPTIONAL, oneof_index=0
            )


_POOL = descriptor_pool.DescriptorPool()
_add(_POOL, admin_pb2.DESCRIPTOR, set())
