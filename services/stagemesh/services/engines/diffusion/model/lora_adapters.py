"""LoRA adapters of a transformer, which diffusers and PEFT apply. At most one adapter is active at a time.

Adapters are read from folders in the format of PEFT or diffusers.
"""

import itertools
import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from safetensors.torch import load

from stagemesh.common.errors import InvalidRequestError, NotFoundError
from stagemesh.services.engines import adapter_files
from stagemesh.services.engines.adapter_files import AdapterFiles, Sizes, invalid
from stagemesh.services.engines.adapters import check_rank

DIFFUSERS_WEIGHTS = "pytorch_lora_weights.safetensors"
_METADATA = "lora_adapter_metadata"
"""Key in the weights file's metadata under which diffusers stores the adapter's configuration."""
_PEFT_PREFIX, _DIFFUSERS_PREFIX = "base_model.model.", "transformer."
_MATRICES = (".lora_A.weight", ".lora_B.weight")


class ModelAdapters:
    """Loads, unloads and activates the LoRA adapters of one model."""

    def __init__(self, model: Any, max_rank: int) -> None:
        self._model, self._max_rank = model, max_rank
        self._keys: dict[str, str] = {}
        """The name of each loaded adapter in PEFT, by adapter name. PEFT's names may not contain dots, but adapter
        names may."""
        self._numbers = itertools.count()
        self._selected: tuple[str, float] | None = None

    def load(self, name: str, path: str) -> int:
        """Loads an adapter from the folder `path` and returns its LoRA rank.

        Raises InvalidRequestError if the adapter does not fit this model.
        """
        lora = read_lora(path)
        check_rank(name, lora.files.rank, most=self._max_rank)
        lora.files.check(self._sizes(lora.files.layers))
        key = f"adapter{next(self._numbers)}"
        try:
            with warnings.catch_warnings():
                # PEFT warns about a second adapter on the model.
                warnings.filterwarnings("ignore", message="Already found a `peft_config` attribute")
                self._model.load_lora_adapter(lora.matrices(), prefix=None, adapter_name=key, metadata=lora.config)
        except Exception as exc:
            # diffusers cleans up after an error, which may raise another error.
            cause = exc.__context__ or exc
            raise InvalidRequestError(f"adapter {name!r}: {cause}", reason="INVALID_ADAPTER") from exc
        finally:
            self._deactivate()
        self._keys[name] = key
        return lora.files.rank

    def unload(self, name: str) -> None:
        """Removes an adapter from the model. Does nothing if the adapter is not loaded."""
        key = self._keys.pop(name, None)
        if key is not None:
            self._deactivate()
            self._model.delete_adapters(key)

    def select(self, name: str | None, scale: float) -> None:
        """Activates the adapter `name` with the strength `scale` for the next forward passes. All other adapters are
        inactive.

        If `name` is None, deactivates all adapters. Raises NotFoundError if the adapter is not loaded.
        """
        wanted = None if name is None else (name, scale)
        if wanted == self._selected:
            return
        if name is None:
            self._model.disable_lora()
            self._selected = None
            return
        if name not in self._keys:
            raise NotFoundError(
                f"adapter {name!r} is no longer loaded", reason="UNKNOWN_ADAPTER", metadata={"adapter": name}
            )
        self._model.set_adapters(self._keys[name], scale)
        self._model.enable_lora()
        self._selected = wanted

    # -- inner workings

    def _sizes(self, layers: Mapping[str, object]) -> dict[str, Sizes | None]:
        """Returns the input and output sizes of the model's layers with these names, by layer name. Omits names that
        the model does not have.

        The value for a layer that is not linear is None, because PEFT itself checks such layers.
        """
        modules = dict(self._model.named_modules())
        known = {name: modules[name] for name in layers if name in modules}
        return {
            name: Sizes(module.in_features, module.out_features) if hasattr(module, "in_features") else None
            for name, module in known.items()
        }

    def _deactivate(self) -> None:
        self._selected = None
        if getattr(self._model, "peft_config", None):
            # With no active adapter, PEFT does not activate another adapter when one is deleted.
            self._model.set_adapters([])
            self._model.disable_lora()


@dataclass(frozen=True)
class LoraFiles:
    """The configuration and the weight shapes of a LoRA adapter. Layers have the same names as in the transformer."""

    files: AdapterFiles
    config: Mapping[str, Any] | None
    """Arguments for PEFT's `LoraConfig`. None if the adapter has no configuration. In this case, LoRA's alpha equals
    the rank."""
    weights: Path
    prefix: str

    def matrices(self) -> dict[str, torch.Tensor]:
        """Reads the LoRA matrices from the weights file. Returns the matrices by name, without the name prefix of the
        file format.
        """
        return {name.removeprefix(self.prefix): tensor for name, tensor in load(self.weights.read_bytes()).items()}


def read_lora(path: str) -> LoraFiles:
    """Reads an adapter's configuration and weight shapes from the folder `path`. Raises InvalidRequestError if the
    adapter's files are invalid.
    """
    folder = Path(path)
    if folder.is_absolute() and (folder / DIFFUSERS_WEIGHTS).exists() and not (folder / adapter_files.CONFIG).exists():
        return _read_diffusers(folder)
    files = adapter_files.read_adapter(path)
    weights = folder / adapter_files.WEIGHTS
    _check_names(folder, adapter_files.read_head(weights).shapes, _PEFT_PREFIX)
    return _lora_files(files, json.loads((folder / adapter_files.CONFIG).read_bytes()), weights, _PEFT_PREFIX)


def _read_diffusers(folder: Path) -> LoraFiles:
    weights = folder / DIFFUSERS_WEIGHTS
    head = adapter_files.read_head(weights)
    _check_names(folder, head.shapes, _DIFFUSERS_PREFIX)
    layers = adapter_files.layers_of(folder, head.shapes)
    rank = max(shape[0] for name, shape in head.shapes.items() if name.endswith(_MATRICES[0]))
    config: dict[str, Any] | None = json.loads(head.metadata.get(_METADATA, "null"))
    if config is not None:
        config = {name.removeprefix(_DIFFUSERS_PREFIX): value for name, value in config.items()}
    return _lora_files(AdapterFiles(folder, rank, layers), config, weights, _DIFFUSERS_PREFIX)


def _check_names(folder: Path, names: Mapping[str, object], prefix: str) -> None:
    for name in names:
        if not name.startswith(prefix):
            raise invalid(folder, f"it changes {name}; this stage accepts adapters of the transformer only ({prefix}…)")
        if not name.endswith(_MATRICES):
            raise invalid(
                folder,
                f"it contains {name}, which is neither lora_A nor lora_B; save it with diffusers' save_lora_weights",
            )


def _lora_files(files: AdapterFiles, config: Mapping[str, Any] | None, weights: Path, prefix: str) -> LoraFiles:
    """Returns the adapter's files with `prefix` removed from the layer names. `prefix` is the name prefix of the file
    format.

    Raises InvalidRequestError if PEFT rejects the configuration.
    """
    layers = {name.removeprefix(prefix): sizes for name, sizes in files.layers.items()}
    if config is not None:
        names = {field.name for field in fields(LoraConfig)}
        known = {name: value for name, value in config.items() if name in names}
        try:
            LoraConfig(**known)
        except (TypeError, ValueError) as exc:
            raise invalid(files.folder, f"PEFT rejects its configuration: {exc}") from exc
        # The adapter changes exactly the layers that have LoRA matrices.
        config = {**known, "target_modules": list(layers), "task_type": None}
    return LoraFiles(replace(files, layers=layers), config, weights, prefix)
