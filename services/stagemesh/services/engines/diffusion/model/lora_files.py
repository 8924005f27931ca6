"""LoRA and LoKr adapters as they are published: their files, their conversion by diffusers, and their checks."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from diffusers.utils.state_dict_utils import convert_unet_state_dict_to_peft  # pyright: ignore[reportUnknownVariableType]
from peft import LoraConfig
from safetensors.torch import load

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines import adapter_files
from stagemesh.services.engines.adapter_files import Sizes, invalid
from stagemesh.services.engines.diffusion.model.loading import DENOISERS

_DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
_PEFT_PREFIX = "base_model.model."
_SECOND = "transformer_2"
_NOISE = ("high", "low")
"""The parts of the names of the files for the first and the second transformer of a model with two."""
_MATRIX = re.compile(r"(.+)\.(lora_A\.weight|lora_B\.weight|lora_B\.bias|lokr_w[12](?:_[ab])?)")
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_MAX_CAUSE = 300


@dataclass(frozen=True)
class LoraPart:
    """The matrices of an adapter for one component of a pipeline."""

    path: Path
    component: str
    """Name of the component in the pipeline."""
    prefix: str
    """Prefix of the names of the matrices, without the dot."""
    matrices: Mapping[str, torch.Tensor]
    """The matrices by their names in PEFT's format, with the prefix."""
    config: Mapping[str, Any] | None
    """Arguments for PEFT's configuration, with the prefix. None if diffusers derives them from the matrices."""
    alphas: Mapping[str, float] | None = None
    """The alphas that diffusers has not multiplied into the matrices, by layer name."""


def denoisers(pipeline: Any) -> dict[str, Any]:
    """Returns the models of a diffusers pipeline whose layers an adapter may change, by component name."""
    models = {name: getattr(pipeline, name, None) for name in DENOISERS}
    return {name: model for name, model in models.items() if hasattr(model, "load_lora_adapter")}


def read_lora(path: str, pipeline: Any) -> list[LoraPart]:
    """Reads an adapter for a diffusers pipeline from a folder or from a .safetensors file.

    Raises InvalidRequestError if the files are invalid, or if the pipeline's models lack what the adapter changes.
    """
    place, models = Path(path), denoisers(pipeline)
    if not place.is_absolute() or not place.exists():
        raise invalid(place, "it must be an absolute path of a folder or of a .safetensors file on this machine")
    if (place / adapter_files.CONFIG).exists():
        return [_read_peft(place, next(iter(models), DENOISERS[0]))]
    files = _weight_files(place, split=_SECOND in models)
    return [_convert(file, pipeline, second=_SECOND in models and _is_of("low", file)) for file in files]


def check_part(part: LoraPart, model: Any) -> int:
    """Returns the rank of an adapter: the largest rank of its matrices. A LoKr of whole factors has the rank 1.

    Raises InvalidRequestError if a matrix has no meaning to PEFT, does not fit its layer of `model`, or contains NaN or
    infinite values.
    """
    modules, layers = dict(model.named_modules()), _layers(part)
    if len({next(iter(kinds)).startswith("lokr") for kinds in layers.values()}) > 1:
        raise invalid(part.path, "it contains LoRA and LoKr matrices; split it into two adapters")
    for layer, kinds in layers.items():
        if layer not in modules:
            raise invalid(part.path, f"it changes {layer}, which the model does not have; it belongs to another model")
        module = modules[layer]
        weight = getattr(module.get_base_layer() if hasattr(module, "get_base_layer") else module, "weight", None)
        given = _sizes(part.path, layer, kinds)
        if weight is None or weight.ndim < 2:
            raise invalid(part.path, f"it changes {layer}, which is neither linear nor a convolution")
        expected = Sizes(math.prod(weight.shape[1:]), weight.shape[0])
        if given != expected:
            raise invalid(
                part.path,
                f"{layer} has {given.inputs} inputs and {given.outputs} outputs in the adapter but {expected.inputs} "
                f"and {expected.outputs} in the model; it belongs to another model",
            )
    return max(tensor.shape[0] for kinds in layers.values() for tensor in _ranked(kinds))


# -- files


def _weight_files(place: Path, *, split: bool) -> Sequence[Path]:
    """Returns the weight files of an adapter: one, or two if `split` and they are named for high and for low noise."""
    files = [place] if place.is_file() else sorted(place.glob("*.safetensors"))
    named = [file for file in files if file.name == _DIFFUSERS_WEIGHTS] or files
    if split and len(named) == 2 and [sum(_is_of(noise, file) for file in named) for noise in _NOISE] == [1, 1]:
        return named
    pickles = [file.name for file in ([place] if place.is_file() else place.iterdir()) if file.suffix in _PICKLES]
    if pickles and named in ([], [place]):
        raise invalid(place, f"{min(pickles)} is a pickle, which may run code; convert it to safetensors")
    if len(named) != 1:
        names = ", ".join(file.name for file in named[:8]) or "none"
        raise invalid(place, f"it must contain one .safetensors file; it contains {names}; use the path of a file")
    return named


def _is_of(noise: str, file: Path) -> bool:
    return re.search(rf"{noise}[-_ ]?noise", file.name, re.IGNORECASE) is not None


def _read_peft(folder: Path, component: str) -> LoraPart:
    adapter_files.read_adapter(str(folder))
    weights = folder / adapter_files.WEIGHTS
    for name in adapter_files.read_head(weights).shapes:
        if not name.startswith(_PEFT_PREFIX):
            raise _foreign(folder, name, _PEFT_PREFIX)
    matrices = _load(weights)
    named = {f"{component}.{name.removeprefix(_PEFT_PREFIX)}": tensor for name, tensor in matrices.items()}
    config: dict[str, Any] = json.loads((folder / adapter_files.CONFIG).read_bytes())
    config = {f"{component}.{key}": value for key, value in config.items()}
    return _checked(LoraPart(folder, component, component, named, config))


def _load(weights: Path) -> dict[str, torch.Tensor]:
    try:
        return load(weights.read_bytes())
    except Exception as exc:
        raise invalid(weights.parent, f"its {weights.name} is not a safetensors file: {exc}") from exc


def _convert(file: Path, pipeline: Any, *, second: bool) -> LoraPart:
    """Reads a weights file with the converter that diffusers has for the pipeline's models."""
    names = adapter_files.read_head(file).shapes
    if scale := next((name for name in names if "dora_scale" in name or "lora_magnitude" in name), None):
        raise invalid(file, f"it is a DoRA adapter ({scale}), which diffusers would apply without its magnitudes")
    if not hasattr(pipeline, "lora_state_dict"):
        raise invalid(file, f"diffusers reads no adapters of {type(pipeline).__name__}; use a folder in PEFT's format")
    unet = getattr(pipeline, "unet", None)
    try:
        converted = pipeline.lora_state_dict(
            str(file.parent),
            weight_name=file.name,
            use_safetensors=True,
            local_files_only=True,
            return_lora_metadata=True,
            return_alphas=True,
            unet_config=getattr(unet, "config", None),
        )
    except Exception as exc:
        cause = f"{type(exc).__name__}: {exc}"[:_MAX_CAUSE]
        raise invalid(file, f"diffusers cannot convert it for {type(pipeline).__name__}: {cause}") from exc
    matrices, *alphas, metadata = converted
    prefix = "unet" if unet is not None else "transformer"
    alpha = alphas[0] if alphas else None
    return _checked(LoraPart(file, _SECOND if second else prefix, prefix, matrices, metadata, alpha))


def _checked(part: LoraPart) -> LoraPart:
    """Returns a part with the names of its matrices and its configuration in PEFT's format.

    Raises InvalidRequestError if a matrix belongs to another component, or if PEFT rejects the configuration.
    """
    if not part.matrices:
        raise invalid(part.path, "it contains no LoRA matrices")
    for name in part.matrices:
        if not name.startswith(f"{part.prefix}."):
            raise _foreign(part.path, name, f"{part.prefix}.")
    if not any("lora_A" in name or "lokr_" in name for name in part.matrices):
        part = replace(part, matrices=convert_unet_state_dict_to_peft(dict(part.matrices)))
    if part.config is None or any("lokr_" in name for name in part.matrices):
        return part
    known = {field.name for field in fields(LoraConfig)}
    config = {name.removeprefix(f"{part.prefix}."): value for name, value in part.config.items()}
    config = {name: value for name, value in config.items() if name in known}
    # The adapter changes exactly the layers that have LoRA matrices.
    config |= {"target_modules": sorted(_layers(part)), "task_type": None}
    try:
        if LoraConfig(**config).use_dora:
            raise invalid(part.path, "it is a DoRA adapter without magnitudes")
    except (TypeError, ValueError) as exc:
        raise invalid(part.path, f"PEFT rejects its configuration: {exc}") from exc
    return replace(part, config={f"{part.prefix}.{name}": value for name, value in config.items()})


def _foreign(path: Path, name: str, prefix: str) -> InvalidRequestError:
    return invalid(path, f"it changes {name}; this stage accepts adapters of the transformer only ({prefix}…)")


# -- matrices


def _layers(part: LoraPart) -> dict[str, dict[str, torch.Tensor]]:
    """Returns the matrices of each layer by their kind, such as `lora_A.weight`."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in part.matrices.items():
        found = _MATRIX.fullmatch(name.removeprefix(f"{part.prefix}."))
        if found is None:
            raise invalid(part.path, f"it contains {name}, which is not a matrix of a LoRA or LoKr")
        if not torch.isfinite(tensor).all():
            raise invalid(part.path, f"{name} contains NaN or infinite values")
        layers.setdefault(found[1], {})[found[2]] = tensor
    return layers


def _sizes(path: Path, layer: str, kinds: Mapping[str, torch.Tensor]) -> Sizes:
    """Returns the numbers of inputs and outputs of a layer's matrices. The inputs of a convolution include its
    kernel.
    """
    try:
        if "lora_B.weight" in kinds or "lora_A.weight" in kinds:
            down, up = kinds["lora_A.weight"], kinds["lora_B.weight"]
            bias = kinds.get("lora_B.bias", up[:, 0])
            if down.shape[0] == math.prod(up.shape[1:]) and bias.shape[:1] == up.shape[:1]:
                return Sizes(math.prod(down.shape[1:]), up.shape[0])
        else:
            left, right = _factor(kinds, "lokr_w1"), _factor(kinds, "lokr_w2")
            return Sizes(left.inputs * right.inputs, left.outputs * right.outputs)
    except (KeyError, IndexError) as exc:
        raise invalid(path, f"the matrices of {layer} are not complete: {exc}") from exc
    raise invalid(path, f"the two matrices of {layer} do not fit: {list(down.shape)} and {list(up.shape)}")


def _factor(kinds: Mapping[str, torch.Tensor], name: str) -> Sizes:
    whole = kinds.get(name)
    if whole is not None:
        return Sizes(math.prod(whole.shape[1:]), whole.shape[0])
    down, up = kinds[f"{name}_b"], kinds[f"{name}_a"]
    if down.shape[0] != up.shape[1]:
        raise KeyError(f"{name} has factors of {list(up.shape)} and {list(down.shape)}")
    return Sizes(math.prod(down.shape[1:]), up.shape[0])


def _ranked(kinds: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Returns the matrices whose first axis is a rank."""
    ranked = [kinds[name] for name in ("lora_A.weight", "lokr_w1_b", "lokr_w2_b") if name in kinds]
    return ranked or [torch.empty(1)]
