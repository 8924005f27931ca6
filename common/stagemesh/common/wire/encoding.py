"""Protobuf messages: their creation from objects, parts of their serialized form, and their digests."""

import hashlib
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, EnumDescriptor
from google.protobuf.message import DecodeError, Message

_LENGTH_DELIMITED = 2
_SMALL_NUMBERS = [bytes((number,)) for number in range(0x80)]
"""The encodings of the numbers that need one byte."""

_MessageT = TypeVar("_MessageT", bound=Message)


def varint(number: int) -> bytes:
    """Returns a number that is not negative in protobuf's encoding of variable length.

    Each byte contains seven bits, lowest first, and a bit that marks further bytes.
    """
    if number < len(_SMALL_NUMBERS):
        return _SMALL_NUMBERS[number]
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """Decodes the varint at the offset `at`. Returns its value and the offset after it.

    Raises IndexError if the varint is truncated, or DecodeError if the varint is longer than 10 bytes.
    """
    number = 0
    for shift in range(0, 70, 7):
        byte = view[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
    raise DecodeError("a number has more than 10 bytes")


def tag_of(message: Descriptor, field: str) -> bytes:
    """Returns the bytes that precede the length and the content of a field that contains a message or bytes."""
    return varint(message.fields_by_name[field].number << 3 | _LENGTH_DELIMITED)


def embedded(tag: bytes, *parts: bytes) -> bytes:
    """Returns a serialized field whose content is the concatenation of `parts`. `tag` is the result of `tag_of`.

    Embedding a serialized message needs no parser.
    """
    return b"".join((tag, varint(sum(map(len, parts))), *parts))


def to_message(message: type[_MessageT], source: object, **fields: Any) -> _MessageT:
    """Returns a message of the type `message`, with field values copied from `source`.

    `fields` contains the values of individual fields by name. Every other field receives the value of the attribute of
    `source` with the same name.
    """
    names = message.DESCRIPTOR.fields_by_name.keys() - fields.keys()
    return message(**{name: getattr(source, name) for name in names}, **fields)


def without_fields(message: _MessageT, *names: str) -> _MessageT:
    """Returns a copy of a message without these fields and without fields that this process does not know.

    A name such as "parameters.seed" means a field of an embedded message. The copy omits the embedded message if no
    other field of it is set.
    """
    content = type(message)()
    content.CopyFrom(message)
    content.DiscardUnknownFields()
    for name in names:
        outer, _, inner = name.partition(".")
        if inner and content.HasField(outer):
            getattr(content, outer).ClearField(inner)
        if not inner or not getattr(content, outer).ByteSize():
            content.ClearField(outer)
    return content


def digest_of(message: Message) -> bytes:
    """Returns a digest of a message, which is equal for equal messages of the same version of Stagemesh."""
    return hashlib.blake2b(message.SerializeToString(deterministic=True), digest_size=16).digest()


def enum_word(enum: EnumDescriptor, value: int) -> str:
    """Returns the name of a protobuf enum value in lower case, without the prefix that all names of the enum share.

    Returns the number as text if this version does not know the value.
    """
    named = enum.values_by_number.get(value)
    prefix = enum.values[0].name.removesuffix("UNSPECIFIED")
    return str(value) if named is None else named.name.removeprefix(prefix).lower()
