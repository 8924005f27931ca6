"""Protobuf messages: their creation from objects, parts of their serialized form, their limits, and their digests."""

import hashlib
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar, cast

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import DecodeError, Message

from stagemesh.common.errors import InvalidRequestError

MAX_TOKENS = 1 << 19
"""The maximum number of token ids in one list of a message."""
_TOKEN_LISTS = frozenset({"stagemesh.v1.TokenIds.ids", "stagemesh.v1.Checkpoint.token_ids"})
_VARINT, _LENGTH_DELIMITED = 0, 2
_MAX_VARINT_BYTES, _TOO_LONG = 10, "a number has more than 10 bytes"
_FIXED_BYTES: Mapping[int, int] = {1: 8, 5: 4}
"""The number of bytes of a value of fixed length, by wire type."""
_CONTINUED = bytes(range(0x80, 0x100))
"""The bytes of a varint that further bytes follow."""
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


def read_field(view: memoryview, at: int) -> tuple[int, int, int]:
    """Reads the tag of the field at the offset `at`, and the length of its content.

    Returns the tag, the offset of the content, and the offset after the content, which may exceed the view. Raises
    IndexError if the field is truncated, DecodeError if a number is too long, and KeyError if the type is unknown, as
    groups are, which the protos do not use.
    """
    tag = view[at]
    at += 1
    # Most numbers have one byte, for which a call would take longer than the rest.
    if tag > 0x7F:
        tag, at = _read_varint(view, at - 1)
    kind = tag & 7
    if kind == _LENGTH_DELIMITED:
        size_bytes = view[at]
        at += 1
        if size_bytes > 0x7F:
            size_bytes, at = _read_varint(view, at - 1)
        return tag, at, at + size_bytes
    if kind == _VARINT:
        start = at
        while view[at] > 0x7F:
            at += 1
            if at - start == _MAX_VARINT_BYTES:
                raise DecodeError(_TOO_LONG)
        return tag, start, at + 1
    return tag, at, at + _FIXED_BYTES[kind]


def _read_varint(view: memoryview, at: int) -> tuple[int, int]:
    """Decodes the varint at the offset `at`. Returns its value and the offset after it."""
    number = 0
    for shift in range(0, 7 * _MAX_VARINT_BYTES, 7):
        byte = view[at]
        number |= (byte & 0x7F) << shift
        at += 1
        if byte < 0x80:
            return number, at
    raise DecodeError(_TOO_LONG)


def parse_message(message: type[_MessageT], data: bytes, *, max_fields: int) -> _MessageT:
    """Parses a serialized message, unless it has more than `max_fields` fields (`count_fields`).

    Raises InvalidRequestError (MALFORMED_MESSAGE, MESSAGE_TOO_LARGE).
    """
    try:
        # A field has at least one byte.
        if len(data) > max_fields:
            count_fields(data, message, most=max_fields)
        return message.FromString(data)
    except DecodeError as exc:
        raise InvalidRequestError(
            f"a message is not a valid {message.DESCRIPTOR.name}: it is damaged, or a string in it is not UTF-8; send "
            "the messages of the protos",
            reason="MALFORMED_MESSAGE",
        ) from exc


def count_fields(data: bytes, message: type[Message], *, most: int) -> int:
    """Returns the number of fields in a serialized message of the type `message`. Stops at `most` of them.

    Each value, each element of a list and each entry of a map counts, at any depth. A list of token ids counts as one.
    Reading tags takes time for each field, but parsing would also take memory.

    Raises InvalidRequestError (MESSAGE_TOO_LARGE) if there are more fields than `most`, or more than `MAX_TOKENS` token
    ids in a list, and DecodeError if the message is malformed.
    """
    try:
        return most - _left_after(memoryview(data), cast("Descriptor", message.DESCRIPTOR), most)
    except _TooManyFieldsError as exc:
        problem = f"a message has more than {most:,} values, list elements and map entries, or {MAX_TOKENS:,} token ids"
        text = f"{problem}; the one beyond the limit is in {exc}; send fewer of them, or several messages"
        raise InvalidRequestError(text, reason="MESSAGE_TOO_LARGE", metadata={"field": str(exc)}) from None
    except (IndexError, KeyError) as exc:
        raise DecodeError("the message ends within a field, or a field has an unknown type") from exc


class _TooManyFieldsError(Exception):
    """Raised with the path of the field beyond the limit."""


def _left_after(view: memoryview, message: Descriptor, left: int, path: str = "") -> int:
    """Returns `left` less the number of fields of the message in `view`, which is at `path`."""
    nested, at = _nested(message), 0
    while at < len(view):
        tag, start, at = read_field(view, at)
        left -= 1
        field = nested.get(tag >> 3) if tag & 7 == _LENGTH_DELIMITED else None
        if field is not None and field.message_type is not None and left >= 0:
            left = _left_after(view[start:at], field.message_type, left, f"{path}{field.name}.")
        elif field is not None:
            values = len(bytes(view[start:at]).translate(None, _CONTINUED))
            left -= values if values > MAX_TOKENS or field.full_name not in _TOKEN_LISTS else 0
        if left < 0:
            known = message.fields_by_number
            raise _TooManyFieldsError(path + (known[tag >> 3].name if tag >> 3 in known else str(tag >> 3)))
    if at > len(view):
        raise DecodeError("a field exceeds its message")
    return left


@cache
def _nested(message: Descriptor) -> Mapping[int, FieldDescriptor]:
    """Returns the fields of a message that contain messages or packed lists, by their numbers."""
    texts = (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES)
    found = (each for each in message.fields if each.message_type or (each.is_repeated and each.type not in texts))
    return {each.number: each for each in found}


def tag_of(message: Descriptor, field: str) -> bytes:
    """Returns the bytes that precede the length and the content of a field that contains a message or bytes."""
    return varint(message.fields_by_name[field].number << 3 | _LENGTH_DELIMITED)


def embedded(tag: bytes, *parts: bytes) -> bytes:
    """Returns a serialized field whose content is the concatenation of `parts`. `tag` is the result of `tag_of`.

    Embedding a serialized message needs no parser.
    """
    return b"".join((tag, varint(sum(map(len, parts))), *parts))


def to_message(message: type[_MessageT], source: object, /, **fields: Any) -> _MessageT:
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
