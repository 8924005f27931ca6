"""Random protobuf messages: structured ones with extreme values, and mutated bytes of these."""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

_MAX_DEPTH = 5
_INTEGERS = (0, 1, 2, 3, 7, 255, 256, 65535, 1 << 20, (1 << 31) - 1)
_TEXTS = (
    "", "a", "source", "relay", "source->relay", "source-0", "relay-0", "r", "@input", "@state", "text", "text/plain",
    "../../etc/passwd", "\x00", "é" * 40, "%s%n", "{}", "[1, 2]", "x" * 300, "127.0.0.1:1", "127.0.0.1:99999", "a:b:c",
    "grpc", "00-" + "1" * 32 + "-" + "2" * 16 + "-01", "file:///etc/passwd", "memory://x", "\ud7ff", "a\nb", "r/1", "/",
)  # fmt: skip
_BYTES = (b"", b"\x00", b"\xff" * 8, b"a" * 100, bytes(range(256)))
_SIGNED = (*_INTEGERS, -1, -(1 << 31))
_SIGNED_64 = (*_INTEGERS, -1, -(1 << 63), (1 << 63) - 1)
_UNSIGNED = (*_INTEGERS, (1 << 32) - 1)
_UNSIGNED_64 = (*_INTEGERS, 1 << 32, (1 << 63) - 1, (1 << 64) - 1)
_FLOATS = (0.0, 1.0, -1.0, 0.5, 1e-300, 1e300, float("inf"), float("-inf"), float("nan"), 30.0)
_SCALARS: Mapping[int, Sequence[object]] = {
    FieldDescriptor.TYPE_STRING: _TEXTS,
    FieldDescriptor.TYPE_DOUBLE: _FLOATS,
    FieldDescriptor.TYPE_FLOAT: _FLOATS,
    FieldDescriptor.TYPE_BOOL: (False, True),
    FieldDescriptor.TYPE_UINT64: _UNSIGNED_64,
    FieldDescriptor.TYPE_FIXED64: _UNSIGNED_64,
    FieldDescriptor.TYPE_UINT32: _UNSIGNED,
    FieldDescriptor.TYPE_FIXED32: _UNSIGNED,
    FieldDescriptor.TYPE_INT64: _SIGNED_64,
    FieldDescriptor.TYPE_SINT64: _SIGNED_64,
    FieldDescriptor.TYPE_SFIXED64: _SIGNED_64,
}
"""The values of each type of field that has no other rule. All other types have signed integers of 32 bits."""


class MessageFuzzer:
    """Makes random messages. The same seed makes the same messages.

    `fixed` maps the full names of fields to the values that they have in most messages, so that requests are likely to
    pass the first checks.
    """

    def __init__(self, seed: int, *, fixed: Mapping[str, Callable[[random.Random], object]] | None = None) -> None:
        self.random = random.Random(seed)
        self._fixed = fixed or {}

    def message(self, descriptor: Descriptor) -> Message:
        """Returns a message with random fields."""
        return self._fill(GetMessageClass(descriptor)(), depth=0)

    def data(self, descriptor: Descriptor) -> bytes:
        """Returns the bytes of a message, of which a fifth is mutated: it may then not be a message any more."""
        data = self.message(descriptor).SerializeToString()
        return mutated([data], self.random) if self.random.random() < 0.2 else data

    def _fill(self, message: Message, *, depth: int) -> Message:
        # Some messages have nearly all fields, and others nearly none.
        share = self.random.choice((0.1, 0.4, 0.8)) / (1 + depth / 4)
        chosen_oneofs = set[str]()
        fields: list[Any] = list(message.DESCRIPTOR.fields)
        self.random.shuffle(fields)
        for field in fields:
            fixed = self._fixed.get(field.full_name)
            if fixed is None and self.random.random() > share:
                continue
            if (oneof := field.containing_oneof) is not None:
                if oneof.name in chosen_oneofs:
                    continue
                chosen_oneofs.add(oneof.name)
            if fixed is not None and self.random.random() < 0.9:
                setattr(message, field.name, fixed(self.random))
            elif depth < _MAX_DEPTH or field.message_type is None:
                self._set(message, field, depth=depth)
        return message

    def _set(self, message: Message, field: Any, *, depth: int) -> None:
        target: Any = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            for _ in range(self.random.randint(1, 3)):
                key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
                if value.message_type is not None:
                    self._fill(target[self._scalar(key)], depth=depth + 1)
                else:
                    target[self._scalar(key)] = self._scalar(value)
        elif field.is_repeated:
            for _ in range(self.random.choice((1, 1, 2, 3, 20))):
                if field.message_type is not None:
                    self._fill(target.add(), depth=depth + 1)
                else:
                    target.append(self._scalar(field))
        elif field.message_type is not None:
            target.SetInParent()
            self._fill(target, depth=depth + 1)
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: Any) -> Any:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return self.random.choice((*_BYTES, self.random.randbytes(self.random.randint(0, 64))))
        if field.type == FieldDescriptor.TYPE_ENUM:
            return self.random.choice((*(each.number for each in field.enum_type.values), 99))
        return self.random.choice(_SCALARS.get(field.type, _SIGNED))


def mutated(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """Returns one of the seeds after a few random changes: bytes, blocks of bytes, and parts of other seeds."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randint(1, 6)):
        at, kind = rng.randint(0, len(data)), rng.randint(0, 5)
        if kind == 0:
            data[at:at] = rng.randbytes(rng.randint(1, 8))
        elif kind == 1:
            del data[at : at + rng.randint(1, 16)]
        elif kind == 2 and data:
            data[at - 1] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randint(0, 255)))
        elif kind == 3 and data:
            data[at - 1] ^= 1 << rng.randint(0, 7)
        elif kind == 4:
            other = rng.choice(seeds)
            begin = rng.randint(0, len(other))
            data[at:at] = other[begin : begin + rng.randint(1, 64)]
        else:
            data[at : at + 4] = rng.choice((0, 1, (1 << 31) - 1, (1 << 32) - 1)).to_bytes(4, "little")
    return bytes(data)
