"""Serialization of a request's tensors and numbers as a safetensors file, a format that cannot contain code.

The input is a tree of dicts, lists and tuples. The file stores the tree's tensors under consecutive numbers, and all
other values as JSON in the file's metadata. Objects such as models and images cannot be serialized.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from stagemesh.common.errors import InternalError, InvalidChunkError
from stagemesh.common.wire.tensors import Array

Tree: TypeAlias = Any
"""A value that can be serialized: a number, string, None, tensor, NumPy array, generator or dtype, or a collection of
such values (dict with string keys, list or tuple)."""

VERSION = 1
_DTYPES: Mapping[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_LEAVES = (str, int, float, np.generic, np.ndarray, torch.Tensor, torch.dtype, torch.Generator)
_READ_ERRORS = (SafetensorError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
"""The exceptions that reading can raise for data that `serialize` has not written. Includes RecursionError, a subclass
of RuntimeError."""


def serialize(tree: Mapping[str, Tree], *, kind: str, model: str) -> Array:
    """Returns `tree` serialized as uint8[bytes].

    `kind` names the type of content, and `model` is the fingerprint of the model. `deserialize` rejects the data unless
    it is called with the same values.
    """
    collector = _TensorCollector()
    outline = collector.outline(dict(tree))
    head = {"version": VERSION, "kind": kind, "model": model, "tree": outline, "all_on_cpu": collector.all_on_cpu}
    file = save({str(i): tensor for i, tensor in enumerate(collector.tensors)}, {"stagemesh": json.dumps(head)})
    return np.frombuffer(file, np.uint8)


def deserialize(data: Array, *, kind: str, model: str, device: torch.device) -> dict[str, Tree]:
    """Returns the tree whose serialization is `data`, as returned by `serialize`. The tree's tensors are created on
    `device`.

    If the tree had tensors both on the CPU and on a GPU, its CPU tensors remain on the CPU. Raises InvalidChunkError if
    `data` is not a serialized tree, has another `kind`, or belongs to another `model`.
    """
    try:
        head, tensors = _read(data)
    except _READ_ERRORS as exc:
        raise InvalidChunkError(f"{data.nbytes} bytes of {kind} cannot be read: {exc}") from exc
    for name, expected in (("version", VERSION), ("kind", kind), ("model", model)):
        if head.get(name) != expected:
            raise InvalidChunkError(
                f"{kind} has the {name} {head.get(name)!r}, but this stage accepts {expected!r}; run both stages with "
                "the same model and version"
            )
    try:
        restorer = _Restorer(tensors, device, all_on_cpu=head["all_on_cpu"])
        restored = restorer.restored({"dict": head["tree"]["dict"]})
        return cast("dict[str, Tree]", restored)
    except _READ_ERRORS as exc:
        raise InvalidChunkError(f"{kind} contains values that `serialize` did not write: {exc!r}") from exc


def is_serializable(value: Any) -> bool:
    """Returns whether `serialize` accepts a tree that contains `value`."""
    if isinstance(value, Mapping):
        return all(map(is_serializable, cast("Mapping[str, Any]", value).values()))
    if isinstance(value, list | tuple):
        return all(map(is_serializable, cast("list[Any]", value)))
    return value is None or isinstance(value, _LEAVES)


def tensors_of(tree: Tree) -> list[torch.Tensor]:
    """Returns CPU copies of all tensors in a tree. A tensor that occurs several times is returned only once."""
    collector = _TensorCollector()
    collector.outline(tree)
    return collector.tensors


class _TensorCollector:
    """Collects the tensors of a tree and replaces each tensor with its number. A tensor that occurs several times is
    collected only once, because tensors may be large.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.all_on_cpu = True
        self._known: dict[int, int] = {}
        # Retains references, because an id is unique only among living objects.
        self._held: list[torch.Tensor] = []

    def outline(self, value: Any) -> Any:  # noqa: PLR0911  # one line for each type of value
        # mypy narrows `value` by the patterns to types without the attributes used here.
        untyped: Any = value
        match value:
            case np.generic():
                return untyped.item()
            case bool() | str() | int() | float() | None:
                return value
            case torch.Tensor():
                on_cpu = value.device.type == "cpu"
                self.all_on_cpu = self.all_on_cpu and on_cpu
                return {"tensor": self._tensor(value), "cpu": on_cpu}
            case np.ndarray():
                return {"array": self._tensor(torch.from_numpy(np.array(untyped)))}
            case torch.dtype():
                return {"dtype": str(value).removeprefix("torch.")}
            case torch.Generator():
                return {"generator": self._tensor(value.get_state()), "device": value.device.type}
            case tuple() | list():
                kind = "tuple" if isinstance(value, tuple) else "list"
                return {kind: [self.outline(each) for each in untyped]}
            case Mapping():
                return {"dict": [[name, self.outline(each)] for name, each in untyped.items()]}
            case _:
                raise InternalError(f"a {type(value).__name__} cannot be serialized")

    def _tensor(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = len(self.tensors)
            self._held.append(tensor)
            # Views of one tensor share memory, which a file cannot store. Copies do not.
            self.tensors.append(tensor.detach().to("cpu", copy=True).contiguous())
        return self._known[id(tensor)]


def _read(array: Array) -> tuple[dict[str, Any], list[torch.Tensor]]:
    data = array.tobytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["stagemesh"])
    if not isinstance(head, dict):
        raise TypeError("its header is not an object")
    tensors = load(data)
    return cast("dict[str, Any]", head), [tensors[str(i)] for i in range(len(tensors))]


class _Restorer:
    def __init__(self, tensors: list[torch.Tensor], device: torch.device, *, all_on_cpu: bool) -> None:
        self._tensors, self._device, self._all_on_cpu = tensors, device, all_on_cpu

    def restored(self, outline: Tree) -> Tree:  # noqa: PLR0911  # one line for each type of value
        if not isinstance(outline, dict):
            return outline
        fields = cast("dict[str, Any]", outline)
        # The first key is the kind of value. Further keys qualify it.
        kind: str = next(iter(fields), "no kind")
        value: Any = fields.get(kind)
        match kind:
            case "tensor":
                tensor = self._tensors[int(value)]
                return tensor if fields["cpu"] and not self._all_on_cpu else tensor.to(self._device)
            case "array":
                return self._tensors[int(value)].numpy()
            case "dtype":
                return _DTYPES[value]
            case "generator":
                generator = torch.Generator(fields["device"])
                generator.set_state(self._tensors[int(value)])
                return generator
            case "tuple":
                return tuple(self.restored(each) for each in value)
            case "list":
                return [self.restored(each) for each in value]
            case "dict":
                return {name: self.restored(each) for name, each in value}
            case _:
                raise ValueError(f"{kind} is not a kind of value")
