"""A request's tensors and numbers as bytes, to be kept, or to go on elsewhere: safetensors, and never code.

A tree of dicts, lists and tuples is a safetensors file: its tensors under numbers, everything else as JSON in its
metadata. What no tree can hold (a model, a picture) is refused where it is packed.
"""

import json
from collections.abc import Mapping
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from stagemesh.common.errors import InternalError, InvalidChunkError
from stagemesh.common.tensors import Array

Tree: TypeAlias = Any
"""Numbers, texts, None, tensors, generators, dtypes, and dicts (with texts as keys), lists and tuples of them."""

VERSION = 1
_DTYPES: Mapping[str, torch.dtype] = {
    str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)
}
_FOREIGN = (
    SafetensorError,
    ArithmeticError,
    AttributeError,
    IndexError,
    KeyError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What reading a file raises that `pack` has not made; a RecursionError is a RuntimeError."""


def pack(tree: Mapping[str, Tree], *, kind: str, model: str) -> Array:
    """uint8[bytes]. `kind` says what it is and `model` whose; both are checked by `unpack`."""
    packer = _Packer()
    outline = packer.outline(dict(tree))
    head = {"version": VERSION, "kind": kind, "model": model, "tree": outline, "all_on_cpu": packer.all_on_cpu}
    data = save({str(i): tensor for i, tensor in enumerate(packer.tensors)}, {"stagemesh": json.dumps(head)})
    return np.frombuffer(data, np.uint8)


def unpack(packed: Array, *, kind: str, model: str, device: torch.device) -> dict[str, Tree]:
    """What `pack` was given, its tensors on `device`, but for those that were on the CPU beside others on a GPU.

    Raises InvalidChunkError for what is something else, of another model, or no such file at all.
    """
    try:
        head, tensors = _read(packed)
    except _FOREIGN as exc:
        raise InvalidChunkError(f"{packed.nbytes} bytes of {kind} cannot be read: {exc}") from exc
    for name, expected in (("version", VERSION), ("kind", kind), ("model", model)):
        if head.get(name) != expected:
            raise InvalidChunkError(
                f"{kind} has the {name} {head.get(name)!r}; this stage takes {expected!r}: run both stages with the "
                "same model and version"
            )
    try:
        restorer = _Restorer(tensors, device, all_on_cpu=head["all_on_cpu"])
        restored = restorer.restored({"dict": head["tree"]["dict"]})
        return cast("dict[str, Tree]", restored)
    except _FOREIGN as exc:
        raise InvalidChunkError(f"{kind} holds what was never packed: {exc!r}") from exc


def tensors_of(tree: Tree) -> list[torch.Tensor]:
    """Those of a tree, each once."""
    packer = _Packer()
    packer.outline(tree)
    return packer.tensors


class _Packer:
    """Tensors that are met twice are kept once, as they may be large."""

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self.all_on_cpu = True
        self._known: dict[int, int] = {}
        # Ids are those of living objects alone.
        self._held: list[torch.Tensor] = []

    def outline(self, value: Any) -> Any:  # noqa: PLR0911  # a line for each kind of value
        # What a pattern has found out is less than what can be done with it.
        found: Any = value
        match value:
            case np.generic():
                return found.item()
            case bool() | str() | int() | float() | None:
                return value
            case torch.Tensor():
                on_cpu = value.device.type == "cpu"
                self.all_on_cpu = self.all_on_cpu and on_cpu
                return {"tensor": self._tensor(value), "cpu": on_cpu}
            case np.ndarray():
                return {"array": self._tensor(torch.from_numpy(np.array(found)))}
            case torch.dtype():
                return {"dtype": str(value).removeprefix("torch.")}
            case torch.Generator():
                return {"generator": self._tensor(value.get_state()), "device": value.device.type}
            case tuple() | list():
                kind = "tuple" if isinstance(value, tuple) else "list"
                return {kind: [self.outline(each) for each in found]}
            case Mapping():
                return {"dict": [[name, self.outline(each)] for name, each in found.items()]}
            case _:
                raise InternalError(f"a {type(value).__name__} cannot be packed")

    def _tensor(self, tensor: torch.Tensor) -> int:
        if id(tensor) not in self._known:
            self._known[id(tensor)] = len(self.tensors)
            self._held.append(tensor)
            # Clones do not share their memory, as views of one tensor would.
            self.tensors.append(tensor.detach().to("cpu", copy=True).contiguous())
        return self._known[id(tensor)]


def _read(packed: Array) -> tuple[dict[str, Any], list[torch.Tensor]]:
    data = packed.tobytes()
    length = int.from_bytes(data[:8], "little")
    head = json.loads(json.loads(data[8 : 8 + length])["__metadata__"]["stagemesh"])
    if not isinstance(head, dict):
        raise TypeError("its head is no table")
    tensors = load(data)
    return cast("dict[str, Any]", head), [tensors[str(i)] for i in range(len(tensors))]


class _Restorer:
    def __init__(self, tensors: list[torch.Tensor], device: torch.device, *, all_on_cpu: bool) -> None:
        self._tensors, self._device, self._all_on_cpu = tensors, device, all_on_cpu

    def restored(self, outline: Tree) -> Tree:  # noqa: PLR0911  # a line for each kind of value
        if not isinstance(outline, dict):
            return outline
        fields = cast("dict[str, Any]", outline)
        # Beside a kind there may be what else is to be known of the value.
        kind: str = next(iter(fields), "nothing")
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
                raise ValueError(f"{kind} is no kind of value")
