"""Reads the config and the weights' shapes of a LoRA adapter in PEFT's format. Does not read the weights themselves."""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import PositiveInt, TypeAdapter, ValidationError

from stagemesh.common.errors import InvalidRequestError

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"
_MAX_JSON_BYTES = 64 << 20
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True)
class _Config:
    """The fields of PEFT's LoraConfig that Stagemesh uses."""

    r: PositiveInt
    peft_type: Literal["LORA"] = "LORA"
    rank_pattern: dict[str, PositiveInt] | None = None


_CONFIG = TypeAdapter(_Config)


class Sizes(NamedTuple):
    """The number of inputs and the number of outputs of a linear layer."""

    inputs: int
    outputs: int


class Head(NamedTuple):
    """The header of a safetensors file: the shapes of the tensors, and the metadata."""

    shapes: Mapping[str, list[int]]
    """The shapes of the tensors, by name."""
    metadata: Mapping[str, str]


@dataclass(frozen=True)
class AdapterFiles:
    """The properties of an adapter, read from the files in its folder."""

    folder: Path
    rank: int
    """The largest LoRA rank of any of the adapter's layers."""
    layers: Mapping[str, Sizes]
    """The sizes of the linear layers that the adapter changes, by PEFT's layer name.

    The suffix that starts with ".lora_" is removed from the name.
    """

    def check(self, model: Mapping[str, Sizes | None]) -> None:
        """Raises InvalidRequestError if the adapter was made for another model.

        This is the case if the adapter changes a layer that the model lacks, or a layer whose sizes differ. `model`
        maps the names of the model's layers to their sizes, or to None if the sizes are unknown.
        """
        for name, sizes in self.layers.items():
            if name not in model:
                raise invalid(
                    self.folder, f"it changes {name}, which the model does not have; it belongs to another model"
                )
            expected = model[name]
            if expected is not None and sizes != expected:
                raise invalid(
                    self.folder,
                    f"{name} has {sizes.inputs} inputs and {sizes.outputs} outputs in the adapter but "
                    f"{expected.inputs} and {expected.outputs} in the model; it belongs to another model",
                )


def read_adapter(path: str) -> AdapterFiles:
    """Reads the properties of the adapter in the folder `path`: the config, and the header of the weights file.

    Raises InvalidRequestError if either file is missing or invalid, or if `path` is not an absolute path of a folder.
    """
    folder = Path(path)
    if not folder.is_absolute() or not folder.is_dir():
        raise invalid(folder, "it must be an absolute path of a folder on this machine")
    config = _read_config(folder)
    rank = max([config.r, *(config.rank_pattern or {}).values()])
    return AdapterFiles(folder, rank, layers_of(folder, read_head(folder / WEIGHTS).shapes))


def _read_config(folder: Path) -> _Config:
    try:
        with (folder / CONFIG).open("rb") as file:
            return _CONFIG.validate_json(file.read(_MAX_JSON_BYTES))
    except OSError as exc:
        raise invalid(folder, f"it has no readable {CONFIG} ({exc.strerror})") from exc
    except ValidationError as exc:
        first = exc.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise invalid(folder, f"its {CONFIG} does not describe a LoRA: {field} {first['msg']}") from exc


def read_head(path: Path) -> Head:
    """Reads the header of a safetensors file: a JSON object, preceded by its length.

    Raises InvalidRequestError if the file is missing or invalid.
    """
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            head = json.loads(file.read(min(length, _MAX_JSON_BYTES)))
        shapes = {name: list(tensor["shape"]) for name, tensor in head.items() if name != "__metadata__"}
        return Head(shapes, dict(head.get("__metadata__", {})))
    except OSError as exc:
        raise invalid(path.parent, f"it has no readable {path.name} ({exc.strerror})") from exc
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as exc:
        raise invalid(path.parent, f"its {path.name} is not a safetensors file") from exc


def layers_of(folder: Path, shapes: Mapping[str, list[int]]) -> dict[str, Sizes]:
    """Returns the sizes of the layers that an adapter changes, by layer name.

    `shapes` contains the shapes of the adapter's matrices, by tensor name. Each layer has two matrices (LoRA A and B).
    Raises InvalidRequestError if the two shapes of a layer do not match. `folder` is named in the error message.
    """
    names = {name.removesuffix(end) for name in shapes for end in (_DOWN, _UP) if name.endswith(end)}
    layers: dict[str, Sizes] = {}
    for name in sorted(names):
        down, up = shapes.get(name + _DOWN, []), shapes.get(name + _UP, [])
        if len(down) != 2 or len(up) != 2 or down[0] != up[1]:
            raise invalid(folder, f"the two matrices of {name} do not fit: {down} and {up}")
        layers[name] = Sizes(down[1], up[0])
    if not layers:
        raise invalid(folder, "it contains no LoRA matrices")
    return layers


def invalid(folder: Path, problem: str) -> InvalidRequestError:
    """Returns the error for a folder that does not contain a valid adapter. `problem` states the reason."""
    return InvalidRequestError(f"{folder} is not an adapter for this stage: {problem}", reason="INVALID_ADAPTER")
