"""Weights into memory: as they are, random, in fewer bits; and kept elsewhere while they are not needed.

All of it is diffusers' own; what is chosen here is which of it, and what it needs of the machine.
"""

import shutil
import tempfile
import weakref
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers as _diffusers
import torch
from diffusers.hooks.group_offloading import apply_group_offloading

from stagemesh.common.errors import NotReadyError
from stagemesh.services.engines.diffusion.model.load_options import LoadOptions, QuantizationOptions

diffusers: Any = _diffusers

_TRANSFORMER = "transformer"
_QUANTIZATION: Mapping[str, tuple[str, str]] = {
    "torchao": ("TorchAoConfig", "torchao"),
    "bitsandbytes_4bit": ("BitsAndBytesConfig", "bitsandbytes"),
    "bitsandbytes_8bit": ("BitsAndBytesConfig", "bitsandbytes"),
    "quanto": ("QuantoConfig", "optimum.quanto"),
}
"""By backend: diffusers' class, and the module that does it."""
_SEED = 0


class Loader:
    """Fills a pipeline's components."""

    def __init__(self, folder: Path, options: LoadOptions, *, dtype: torch.dtype, device: torch.device) -> None:
        """Raises NotReadyError for what this machine cannot do."""
        self._folder, self._options, self._dtype, self._device = folder, options, dtype, device
        self._remove: Callable[[], object] | None = None
        on_gpu = device.type == "cuda"
        if options.offload == "model" and not on_gpu:
            raise NotReadyError("load.offload model needs a GPU to take weights from; leave it out, or take disk")
        if options.compile and not on_gpu and shutil.which("g++") is None:
            raise NotReadyError("load.compile needs the compiler g++ on a machine without a GPU; install it")

    @property
    def compiles(self) -> bool:
        """Whether the transformer's blocks are compiled: what is put in their place would have them compiled anew."""
        return self._options.compile

    def load(self, components: Any) -> None:
        """Loads all of them; raises NotReadyError for what the options cannot be done to."""
        if self._options.format == "dummy":
            with _seeded():
                self._make(components)
        elif self._options.quantization is not None and _TRANSFORMER in components.component_names:
            self._quantize(components, self._options.quantization)
        components.load_components(dtype=self._dtype)
        model = getattr(components, _TRANSFORMER, None)
        if model is None:
            return
        if self._options.layerwise_casting != "none":
            storage = getattr(torch, self._options.layerwise_casting)
            model.enable_layerwise_casting(storage_dtype=storage, compute_dtype=self._dtype)
        if self._options.compile:
            model.compile_repeated_blocks(dynamic=True)

    def place(self, components: Any) -> None:
        """Puts them where they are to be; raises NotReadyError for a folder that cannot be used."""
        match self._options.offload:
            case "none":
                components.to(self._device)
            case "model":
                manager = diffusers.ComponentsManager()
                for name, model in _models(components).items():
                    manager.add(name, model)
                manager.enable_auto_cpu_offload(self._device)
            case "group":
                for name, model in _models(components).items():
                    self._offload(name, model, None)
            case "disk":
                disk = self._folder_on_disk()
                self._remove = weakref.finalize(components, shutil.rmtree, disk, ignore_errors=True)
                for name, model in _models(components).items():
                    _untie(model)
                    self._offload(name, model, disk)

    def close(self) -> None:
        """Removes what lies on the disk. Closing twice is harmless."""
        if self._remove is not None:
            self._remove()

    # -- inner workings

    def _make(self, components: Any) -> None:
        """The models with random weights; the rest, such as tokenizers, is as small as it is needed."""
        index = diffusers.DiffusionPipeline.load_config(self._folder, local_files_only=True)
        models: dict[str, Any] = {}
        for name in components.component_names:
            library, kind = index.get(name, (None, None))
            if library in {"diffusers", "transformers"}:
                made = _random(getattr(import_module(library), kind), self._folder / name)
                if made is not None:
                    models[name] = made.to(self._dtype).eval()
        components.register_components(**models)

    def _quantize(self, components: Any, options: QuantizationOptions) -> None:
        spec = components.get_component_spec(_TRANSFORMER)
        try:
            model = spec.load(dtype=self._dtype, quantization_config=_quantized(options))
        except (ImportError, RuntimeError, TypeError, ValueError) as exc:
            raise NotReadyError(
                f"the transformer of {self._folder} cannot be loaded with load.quantization {options.backend}: {exc}",
                reason="MODEL_NOT_LOADED",
            ) from exc
        components.register_components(**{_TRANSFORMER: model})

    def _offload(self, name: str, model: torch.nn.Module, disk: Path | None) -> None:
        by_block = name == _TRANSFORMER and self._options.offload_by == "block"
        apply_group_offloading(
            model,
            onload_device=self._device,
            offload_device=torch.device("cpu"),
            offload_type="block_level" if by_block else "leaf_level",
            num_blocks_per_group=1 if by_block else None,
            # The next group is on its way while one computes.
            use_stream=self._device.type == "cuda",
            offload_to_disk_path=str(disk / name) if disk is not None else None,
        )

    def _folder_on_disk(self) -> Path:
        # A new one: diffusers would take files that are there for those that it has written.
        try:
            return Path(tempfile.mkdtemp(prefix="stagemesh-offload-", dir=self._options.offload_dir))
        except OSError as exc:
            raise NotReadyError(f"load.offload_dir {self._options.offload_dir} cannot be used: {exc}") from exc


def _models(components: Any) -> dict[str, torch.nn.Module]:
    found = {name: getattr(components, name, None) for name in components.component_names}
    return {name: model for name, model in found.items() if isinstance(model, torch.nn.Module)}


def _untie(model: torch.nn.Module) -> None:
    """Has each layer have weights of its own: of what two share, diffusers would write the second time nothing."""
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                setattr(module, name, torch.nn.Parameter(parameter.detach().clone(), requires_grad=False))
            seen.add(id(parameter))


def _random(kind: Any, folder: Path) -> Any:
    """A model of random weights; None for what is no model."""
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
        return None
    if issubclass(kind, diffusers.ModelMixin):
        config: Any = kind
        return config.from_config(config.load_config(folder, local_files_only=True))
    transformer: Any = kind
    return transformer(transformer.config_class.from_pretrained(folder, local_files_only=True))


@contextmanager
def _seeded() -> Generator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        yield


def _quantized(options: QuantizationOptions) -> Any:
    """What diffusers takes for it; raises NotReadyError where the module or the GPU for it is not there."""
    kind, module = _QUANTIZATION[options.backend]
    try:
        import_module(module)
    except ImportError as exc:
        raise NotReadyError(
            f"load.quantization {options.backend} needs the module {module}; install it", reason="MISSING_MODULE"
        ) from exc
    if module == "bitsandbytes" and not torch.cuda.is_available():
        raise NotReadyError(f"load.quantization {options.backend} needs a GPU; take torchao, or leave it out")
    parameters: dict[str, Any] = dict(options.parameters)
    try:
        if options.backend == "torchao":
            parameters["quant_type"] = getattr(import_module("torchao.quantization"), parameters["quant_type"])()
        elif module == "bitsandbytes":
            parameters[f"load_in_{options.backend.removeprefix('bitsandbytes_')}"] = True
        return getattr(diffusers, kind)(**parameters)
    except (TypeError, ValueError, KeyError, AttributeError) as exc:
        raise NotReadyError(f"load.quantization.parameters do not fit {kind}: {exc!r}") from exc
