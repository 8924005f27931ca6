"""The content of the played flows: tensors that fit a stage's signature, chunks, fragments and digests."""

import hashlib
import itertools
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from stagemesh.common.wire.tensors import Array, TensorSpec, dtype_to_wire
from stagemesh.v1 import chunk_pb2, stage_pb2, tensor_pb2
from stagemesh.v1.protocol_pb2 import Protocol

PROTOCOL = Protocol(lowest_version=1, highest_version=1, software="stagemesh conformance")
GRPC = chunk_pb2.CONNECTOR_GRPC
FRAGMENT_BYTES = 1 << 20
"""The largest payload of a fragment."""
UNKNOWN_FIELD = b"\xfa\x7f\x01x"
"""A serialized field of the number 2047, which no message has."""
OWN_REASON = "X_CONFORMANCE"
"""The reason of errors of the played peers. It is not in the catalogue."""
UNACCEPTED = "conformance.unaccepted"
"""The name of a tensor that no stage accepts."""

_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "UINT8", "INT8", "FLOAT8_E4M3", "FLOAT8_E5M2"), 1),
    **dict.fromkeys(("INT16", "UINT16", "FLOAT16", "BFLOAT16"), 2),
    **dict.fromkeys(("INT32", "UINT32", "FLOAT32"), 4),
    **dict.fromkeys(("INT64", "UINT64", "FLOAT64", "COMPLEX64"), 8),
    "COMPLEX128": 16,
}
ITEM_BYTES = {tensor_pb2.DataType.Value(f"DATA_TYPE_{name}"): size for name, size in _ITEM_BYTES.items()}
"""The size of an element in bytes, by the number of its DataType."""
_LENGTH = 4
"""The length of each dimension after the first one that the signature does not fix."""


@dataclass(frozen=True)
class InputTensor:
    """A tensor that the stage accepts, with the content that is sent for it."""

    name: str
    dtype: int
    shape: tuple[int | str, ...]
    is_optional: bool = False
    given: Array | None = None
    """The rows to send, repeated as often as necessary. None for generated ones."""

    @property
    def has_rows(self) -> bool:
        """Whether the number of rows is free. The tensor can then be cut anywhere."""
        return bool(self.shape) and isinstance(self.shape[0], str)

    def rows(self, wanted: int) -> int:
        """Returns the number of rows of a chunk that should have `wanted` rows."""
        return wanted if self.has_rows else int(self.shape[0]) if self.shape else 1

    def tensor(self, first_row: int, rows: int) -> tuple[tensor_pb2.Tensor, bytes]:
        """Returns a tensor without a location, and its bytes. The content depends on the numbers of its rows alone."""
        inner = [each if isinstance(each, int) else _LENGTH for each in self.shape[1:]]
        if self.given is not None:
            inner = list(self.given.shape[1:])
            content = self.given[np.arange(first_row, first_row + rows) % len(self.given)].tobytes()
        else:
            width = math.prod(inner)
            content = _generated(self.dtype, np.arange(first_row * width, (first_row + rows) * width))
        shape = [rows, *inner] if self.shape else []
        message = tensor_pb2.Tensor(name=self.name, shape=shape, first_row=first_row)
        message.dtype = self.dtype  # type: ignore[assignment]
        return message, content


def _generated(dtype: int, numbers: np.ndarray[Any, np.dtype[np.int64]]) -> bytes:
    """Returns elements that depend on their number: letters in bytes, and small values in other types."""
    name = tensor_pb2.DataType.Name(dtype).removeprefix("DATA_TYPE_")  # type: ignore[arg-type]
    match name:
        case "UINT8":
            return (ord("a") + numbers % 26).astype(np.uint8).tobytes()
        case "BOOL":
            return (numbers % 2).astype(np.uint8).tobytes()
        case "BFLOAT16":
            return ((numbers % 23 / 32).astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
        case "FLOAT8_E4M3" | "FLOAT8_E5M2":
            return (numbers % 23 + 32).astype(np.uint8).tobytes()
        case _ if "FLOAT" in name or "COMPLEX" in name:
            return (numbers % 23 / 32).astype(name.lower()).tobytes()
        case _:
            return (numbers % 23).astype(name.lower()).tobytes()


@dataclass
class Payload:
    """The content of a data chunk: its message without locations, and the bytes of each tensor."""

    data: chunk_pb2.ChunkData
    contents: list[bytes]

    @property
    def size_bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(map(len, self.contents))

    def inline(self) -> chunk_pb2.ChunkData:
        """Returns the chunk with its bytes."""

        def locate(tensor: tensor_pb2.Tensor, _: int, content: bytes) -> None:
            tensor.inline = content

        return self._located(locate)

    def streamed(self) -> chunk_pb2.ChunkData:
        """Returns the chunk whose bytes are sent as fragments before it."""

        def locate(tensor: tensor_pb2.Tensor, offset: int, content: bytes) -> None:
            tensor.streamed.offset, tensor.streamed.size_bytes = offset, len(content)

        return self._located(locate)

    def _located(self, locate: Callable[[tensor_pb2.Tensor, int, bytes], None]) -> chunk_pb2.ChunkData:
        data, offset = chunk_pb2.ChunkData(), 0
        data.CopyFrom(self.data)
        for tensor, content in zip(data.tensors, self.contents, strict=True):
            if content:
                locate(tensor, offset, content)
            offset += len(content)
        return data


@dataclass(frozen=True)
class Inputs:
    """The tensors that the stage accepts from edges, as they are sent on one edge."""

    tensors: Sequence[InputTensor] = ()

    @property
    def row_bytes(self) -> int:
        """The number of bytes of a chunk of one row. 0 if a tensor has a fixed number of rows."""
        return self.chunk(0, 1).size_bytes if all(each.has_rows for each in self.tensors) else 0

    def chunk(self, number: int, rows: int, *, first_row: int | None = None, size_bytes: int = 0) -> Payload:
        """Returns the chunk with this number. The earlier chunks had as many rows, unless `first_row` is given.

        A tensor that the stage does not accept fills it up to `size_bytes` bytes.
        """
        payload = Payload(chunk_pb2.ChunkData(), [])
        for each in self.tensors:
            own = each.rows(rows)
            start = first_row if first_row is not None and each.has_rows else number * own
            message, content = each.tensor(start, own)
            payload.data.tensors.append(message)
            payload.contents.append(content)
        if (missing := size_bytes - payload.size_bytes) > 0:
            row = number * missing
            payload.data.tensors.add(name=UNACCEPTED, dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[missing], first_row=row)
            payload.contents.append(bytes(missing))
        payload.data.size_bytes = payload.size_bytes
        return payload


def read_inputs(accepted: Sequence[Any], given: Mapping[str, str]) -> Inputs:
    """Returns the inputs of a stage.

    - `accepted` are the AcceptedTensors of its signature. Tickets are omitted.
    - `given` has a type such as "float32[frames, 8]" or the path of an .npy file for some tensors by name.

    Raises ValueError if a value of `given` is neither.
    """
    tensors = {
        each.spec.name: InputTensor(
            each.spec.name,
            each.spec.dtype,
            tuple(int(dim) if dim.isdigit() else dim for dim in each.spec.shape),
            each.optional,
        )
        for each in accepted
        if not each.spec.ticket_kind
    }
    for name, text in given.items():
        if text.endswith(".npy"):
            array: Array = np.load(Path(text), allow_pickle=False)
            known = tensors.get(name)
            dtype = known.dtype if known else dtype_to_wire(array.dtype.name)
            tensors[name] = InputTensor(name, dtype, known.shape if known else ("rows", *array.shape[1:]), given=array)
        else:
            spec = TensorSpec.parse(text)
            tensors[name] = InputTensor(name, dtype_to_wire(spec.dtype), spec.shape)
    return Inputs(tuple(tensors.values()))


def fragments_of(key: chunk_pb2.EdgeKey, seq: int, content: bytes, *, size: int = 256 << 10) -> list[stage_pb2.PutItem]:
    """Returns the fragments of a chunk's bytes, of at most `size` bytes each."""
    return [
        stage_pb2.PutItem(
            fragment=chunk_pb2.ChunkFragment(
                key=key, seq=seq, total_bytes=len(content), offset=offset, payload=content[offset : offset + size]
            )
        )
        for offset in range(0, len(content), size)
    ]


def digest_of(chunks: Sequence[chunk_pb2.ChunkData]) -> bytes:
    """Returns the digest of a flow with these data chunks."""

    def described(data: chunk_pb2.ChunkData) -> bytes:
        names = (each.name.encode() for each in data.tensors)
        return struct.pack("<I", len(data.tensors)) + b"".join(
            struct.pack(
                f"<I{len(name)}sII{len(each.shape)}Q", len(name), name, each.dtype, len(each.shape), *each.shape
            )
            for name, each in zip(names, data.tensors, strict=True)
        )

    runs = itertools.groupby(map(described, chunks))
    return hashlib.sha256(b"".join(struct.pack("<Q", len(list(run))) + each for each, run in runs)).digest()


@dataclass
class ReceivedRows:
    """The rows of each tensor that have arrived on an edge."""

    counts: dict[str, int] = field(default_factory=dict[str, int])

    def problem_of(self, data: chunk_pb2.ChunkData) -> str:
        """Counts the rows of a chunk. Returns what is wrong with their numbers, or "" if they continue the edge's."""
        context = data.context_frames
        for tensor in data.tensors:
            rows, have = tensor.shape[0] if tensor.shape else 1, self.counts.get(tensor.name, 0)
            if tensor.first_row + context != have:
                return f"first_row {tensor.first_row} of {tensor.name!r} after {have} rows with context {context}"
            self.counts[tensor.name] = tensor.first_row + rows
        return ""


def read_vectors(name: str) -> Mapping[str, Any]:
    """Returns the test vectors of a file in protos/vectors by their names."""
    text = (files("stagemesh.stage_conformance") / "vectors" / f"{name}.json").read_text(encoding="utf-8")
    return {each["name"]: each for each in json.loads(text)}
