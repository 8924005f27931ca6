"""Tensors and small typed values, and their conversion to and from protobuf messages."""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from stagemesh.common.errors import InvalidChunkError
from stagemesh.v1 import tensor_pb2

Array: TypeAlias = npt.NDArray[np.generic]
Tensors: TypeAlias = Mapping[str, Array]

DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "bool": np.dtype(np.bool_),
    "uint8": np.dtype(np.uint8),
    "int8": np.dtype(np.int8),
    "int16": np.dtype("<i2"),
    "int32": np.dtype("<i4"),
    "int64": np.dtype("<i8"),
    "uint32": np.dtype("<u4"),
    "uint64": np.dtype("<u8"),
    "float16": np.dtype("<f2"),
    "bfloat16": np.dtype("<u2"),
    "float32": np.dtype("<f4"),
    "float64": np.dtype("<f8"),
    "complex64": np.dtype("<c8"),
    "complex128": np.dtype("<c16"),
}
"""The element types that can be sent and received. numpy has no float8, and the bits of bfloat16 are in its uint16."""
FLOAT = "float"
"""Any floating-point dtype, in a `TensorSpec`."""
HANDOVER = "handover"
"""The dtype of a ticket in a `TensorSpec`. The kind of the ticket is in the place of the shape: `handover[vllm.kv]`."""
_FLOATS = frozenset({FLOAT, "float16", "bfloat16", "float32", "float64"})
MAX_DIMENSIONS = 16

_WIRE_NAMES: Mapping[int, str] = {
    number: name.removeprefix("DATA_TYPE_").lower()
    for name, number in tensor_pb2.DataType.items()
    if name.removeprefix("DATA_TYPE_").lower() in DTYPES
}
_NAME_BY_DTYPE: Mapping[np.dtype[np.generic], str] = {dtype: name for name, dtype in DTYPES.items()}
_KIND = re.compile(r"(?=.{1,64}$)[a-z0-9_]+([.-][a-z0-9_]+)*")
_SPEC = re.compile(r"(?P<dtype>[a-z0-9]+)\[(?P<shape>[^\]]*)\]")


@dataclass(frozen=True)
class TensorSpec:
    """A tensor type, which consists of a dtype and a shape, for example `float32[frames, 601]`.

    Each dimension is either a fixed length or a symbol that stands for any length. `handover[vllm.kv]` is not a tensor,
    but a ticket of the kind `vllm.kv` for state that engines hand over themselves.
    """

    dtype: str
    """A key of `DTYPES`, `HANDOVER`, or `FLOAT` in the descriptor of a transform for any floating-point dtype."""
    shape: tuple[int | str, ...]

    @classmethod
    def parse(cls, text: str) -> "TensorSpec":
        """Returns the tensor type in `text`, which has the form `dtype[dim, dim, …]`.

        Raises ValueError if the form is invalid.
        """
        match = _SPEC.fullmatch(text.strip())
        if match is not None and match["dtype"] == HANDOVER and is_ticket_kind(match["shape"]):
            return cls.ticket(match["shape"])
        if match is None or match["dtype"] not in DTYPES:
            raise ValueError(
                f"{text!r} is not a tensor type; write one like float32[frames, 601]; dtypes: {', '.join(DTYPES)}"
            )
        dims = [dim.strip() for dim in match["shape"].split(",") if dim.strip()]
        return cls(match["dtype"], tuple(int(dim) if dim.isdigit() else dim for dim in dims))

    @classmethod
    def ticket(cls, kind: str) -> "TensorSpec":
        """Returns the type of tickets of this kind, such as "vllm.kv"."""
        return cls(HANDOVER, (kind,))

    @property
    def ticket_kind(self) -> str:
        """The kind of the ticket, or "" if this is the type of a tensor."""
        return str(self.shape[0]) if self.dtype == HANDOVER else ""

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    def accepts(self, other: "TensorSpec") -> bool:
        """Returns whether each tensor or ticket of the type `other` also has this type."""
        if HANDOVER in (self.dtype, other.dtype):
            return self == other
        return (
            _dtypes_fit(self.dtype, other.dtype)
            and len(self.shape) == len(other.shape)
            and all(
                isinstance(mine, str) or mine == theirs for mine, theirs in zip(self.shape, other.shape, strict=True)
            )
        )

    def check(self, name: str, tensor: Array) -> None:
        """Raises InvalidChunkError if `tensor` does not have this type.

        The error message names the tensor as `name`.
        """
        fits = _dtypes_fit(self.dtype, dtype_name(tensor)) and tensor.ndim == len(self.shape)
        if not fits or any(
            isinstance(want, int) and want != have for want, have in zip(self.shape, tensor.shape, strict=True)
        ):
            raise InvalidChunkError(f"tensor {name!r} is {tensor.dtype}{list(tensor.shape)}; expected {self}")


def is_ticket_kind(kind: str) -> bool:
    """Returns whether `kind` is a valid name for the kind of a ticket, such as "vllm.kv"."""
    return _KIND.fullmatch(kind) is not None


def _dtypes_fit(first: str, second: str) -> bool:
    return first == second or (FLOAT in (first, second) and {first, second} <= _FLOATS)


def as_bytes(tensor: Array) -> memoryview:
    """Returns the bytes of a tensor, without a copy if the tensor is contiguous."""
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def dtype_name(tensor: Array) -> str:
    """Returns the name of a tensor's dtype in `DTYPES`.

    Raises InvalidChunkError if `DTYPES` does not contain the dtype.
    """
    name = _NAME_BY_DTYPE.get(tensor.dtype)
    if name is None:
        raise InvalidChunkError(f"dtype {tensor.dtype} cannot be sent; use one of {', '.join(DTYPES)}")
    return name


def dtype_to_wire(name: str) -> tensor_pb2.DataType.ValueType:
    """Returns the protobuf enum value of the dtype that is called `name` in `DTYPES`."""
    return tensor_pb2.DataType.Value(f"DATA_TYPE_{name.upper()}")


def checked_layout(message: tensor_pb2.Tensor, *, size_bytes: int) -> tuple[np.dtype[np.generic], tuple[int, ...]]:
    """Returns the dtype and shape of the tensor that `message` describes.

    Raises InvalidChunkError if the dtype or shape is invalid, or if such a tensor does not have exactly `size_bytes`
    bytes.
    """
    name = _WIRE_NAMES.get(message.dtype)
    if name is None:
        raise InvalidChunkError(
            f"tensor {message.name!r} has dtype {message.dtype}, which is unknown or not supported here"
        )
    shape, dtype = tuple(message.shape), DTYPES[name]
    is_countable = math.prod(filter(None, shape)) * dtype.itemsize <= sys.maxsize  # also of a tensor without elements
    if len(shape) > MAX_DIMENSIONS or (shape and min(shape) < 0) or not is_countable:
        raise InvalidChunkError(f"tensor {message.name!r} has the impossible shape {list(shape)[:MAX_DIMENSIONS]}")
    expected = math.prod(shape) * dtype.itemsize
    if expected != size_bytes:
        raise InvalidChunkError(
            f"tensor {message.name!r} of {name}{list(shape)} needs {expected} bytes but has {size_bytes}"
        )
    return dtype, shape


def inline_tensor(name: str, tensor: Array) -> tensor_pb2.Tensor:
    """Returns a protobuf message that contains the tensor's bytes, with its name, dtype and shape."""
    dtype = dtype_to_wire(dtype_name(tensor))
    return tensor_pb2.Tensor(name=name, dtype=dtype, shape=tensor.shape, inline=tensor.tobytes())


def read_inline(message: tensor_pb2.Tensor) -> Array:
    """Returns the tensor in a message that contains the tensor's bytes. The tensor is read-only.

    Raises InvalidChunkError if the dtype or shape is invalid, or if the number of bytes does not match the shape.
    """
    payload = message.inline
    dtype, shape = checked_layout(message, size_bytes=len(payload))
    return np.frombuffer(payload, dtype=dtype).reshape(shape)


def rows_of(message: tensor_pb2.Tensor, begin: int, end: int) -> tensor_pb2.Tensor:
    """Returns the rows from `begin` to `end` of a tensor whose bytes are in its message, as another message.

    The number of the tensor's bytes must match its shape, which must have at least one row.
    """
    row_bytes = len(message.inline) // message.shape[0]
    shape, inline = (end - begin, *message.shape[1:]), message.inline[begin * row_bytes : end * row_bytes]
    return tensor_pb2.Tensor(name=message.name, dtype=message.dtype, shape=shape, inline=inline)


def spec_to_wire(name: str, spec: TensorSpec) -> tensor_pb2.TensorSpec:
    """Returns the protobuf message for a tensor or ticket with this name and type."""
    if spec.ticket_kind:
        return tensor_pb2.TensorSpec(name=name, ticket_kind=spec.ticket_kind)
    return tensor_pb2.TensorSpec(name=name, dtype=dtype_to_wire(spec.dtype), shape=[str(dim) for dim in spec.shape])


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
