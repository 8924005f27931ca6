"""Loading of a pipeline's components with original, random or quantized weights, and offloading of the components.

diffusers implements these features. This module applies the features that the stage's options enable, and checks that
the machine supports them.
"""

import shutil
import tempfile
import weakref
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import diffusers as _diffusers
import torch
from diffusers.hooks.group_offloading import apply_group_offloading
from transformers import Qwen2Tokenizer, Qwen2VLImageProcessorPil, Qwen2VLProcessor

from stagemesh.common.errors import NotReadyError, StagemeshError
from stagemesh.services.engines.diffusion.model.families import read_index
from stagemesh.services.engines.diffusion.options import DiffusionOptions, QuantizationOptions
from stagemesh.services.engines.torch_setup import UnusableOptionError

diffusers: Any = _diffusers

DENOISERS = ("transformer", "transformer_2", "unet")
"""The names of the components that predict the noise. A pipeline has one or two of them."""
_LIBRARIES = ("diffusers", "transformers")
_QUANTIZATION: Mapping[str, tuple[str, str]] = {
    "torchao": ("TorchAoConfig", "torchao"),
    "bitsandbytes_4bit": ("BitsAndBytesConfig", "bitsandbytes"),
    "bitsandbytes_8bit": ("BitsAndBytesConfig", "bitsandbytes"),
    "quanto": ("QuantoConfig", "optimum.quanto"),
    "modelopt": ("NVIDIAModelOptConfig", "modelopt"),
}
"""For each quantization backend, the name of its configuration class in diffusers and the name of the Python module
that must be installed."""
_SEED = 0


class Loader:
    """Loads the components of a pipeline, then moves the components to the device or offloads them, depending on the
    options.
    """

    def __init__(self, folder: Path, options: DiffusionOptions, *, device: torch.device) -> None:
        """Creates a loader for the pipeline in `folder`. Raises NotReadyError if this machine does not support the
        loading options.
        """
        self._folder, self._options, self._device = folder, options.load, device
        self._dtype = getattr(torch, options.dtype)
        on_gpu = device.type == "cuda"
        if options.load.offload == "model" and not on_gpu:
            raise UnusableOptionError("load.offload model needs a GPU; omit it, or set disk")
        if options.load.compile and not on_gpu and shutil.which("g++") is None:
            raise UnusableOptionError("load.compile needs the compiler g++ on a machine without a GPU; install g++")

    def load(self, components: Any) -> None:
        """Loads the weights of all components, and moves the components to the device or offloads them.

        Raises NotReadyError if a component cannot be loaded, if an option cannot be applied to a component, or if the
        offload folder cannot be created.
        """
        if self._options.format == "dummy":
            index = read_index(self._folder)
            components.register_components(
                **self._random_models({name: index[name] for name in components.component_names if name in index})
            )
        elif self._options.quantization is not None:
            self._quantize(components, self._options.quantization)
        for name, file in self._options.weights.items():
            self._load_file(components, name, Path(file))
        components.load_components(dtype=self._dtype)
        self._check_loaded(components)
        self._modify(components)
        self._place(components)

    def load_classic(self) -> Any:
        """Loads a pipeline that has no modular form, and moves its models to the device or offloads them.

        Raises NotReadyError if a component is not a class of diffusers or transformers, if the pipeline cannot be
        loaded, or if an option cannot be applied to it.
        """
        index = read_index(self._folder)
        kind = getattr(diffusers, index["_class_name"])
        components: dict[str, Any] = {
            name: value for name, value in index.items() if isinstance(value, list) and value[0] is not None
        }
        for name, (library, class_name) in components.items():
            is_known = library in _LIBRARIES or hasattr(diffusers.pipelines, library)
            if not is_known or (self._folder / name / f"{library}.py").exists():
                raise NotReadyError(
                    f"the {name} ({class_name}) of {self._folder} is code that is not part of diffusers; a stage does "
                    "not run it",
                    reason="UNSUPPORTED_MODEL",
                )
        try:
            pipeline = kind.from_pretrained(
                self._folder, local_files_only=True, dtype=self._dtype, **self._loaded_components(kind, components)
            )
        except StagemeshError:
            raise
        except Exception as exc:
            raise NotReadyError(
                f"{self._folder} cannot be loaded as a {kind.__name__}: {exc}; check that its files are complete",
                reason="LOAD_FAILED",
            ) from exc
        self._modify(pipeline)
        self._place(pipeline)
        return pipeline

    # -- inner workings

    def _loaded_components(self, kind: Any, components: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the arguments of `from_pretrained` for the components that it must not load itself, and for those
        that it must quantize.
        """
        given: dict[str, Any] = self._random_models(components) if self._options.format == "dummy" else {}
        if (options := self._options.quantization) is not None:
            quantized = dict.fromkeys(components.keys() & set(DENOISERS), _quantization_config(options))
            given["quantization_config"] = diffusers.PipelineQuantizationConfig(quant_mapping=quantized)
        # diffusers does not load a component for which the constructor has a default value.
        _, with_default = kind._get_signature_keys(kind)  # noqa: SLF001  # no public access
        for name in components.keys() & set(with_default) - set(kind._optional_components):  # noqa: SLF001
            library, class_name = components[name]
            component = getattr(import_module(library), class_name)
            given[name] = component.from_pretrained(self._folder / name, local_files_only=True)
        return given

    def _check_loaded(self, components: Any) -> None:
        """Raises NotReadyError if diffusers could not load a component. diffusers itself only logs such failures."""
        for name in components.null_component_names:
            spec = components.get_component_spec(name)
            if not spec.pretrained_model_name_or_path:
                continue
            try:
                spec.load(dtype=self._dtype)
            except Exception as exc:
                raise NotReadyError(
                    f"the {name} of {self._folder} cannot be loaded: {exc}; check that its files exist and are "
                    "complete",
                    reason="LOAD_FAILED",
                ) from exc

    def _modify(self, components: Any) -> None:
        """Applies the options that change how the loaded models compute."""
        for name, model in _models(components).items():
            if name in DENOISERS:
                self._modify_denoiser(model)
            if "vae" in name:
                self._modify_vae(model)

    def _modify_denoiser(self, model: Any) -> None:
        options = self._options
        if options.layerwise_casting != "none":
            storage = getattr(torch, options.layerwise_casting)
            model.enable_layerwise_casting(storage_dtype=storage, compute_dtype=self._dtype)
        if options.attention_backend is not None:
            try:
                model.set_attention_backend(options.attention_backend)
            except (ImportError, RuntimeError, ValueError) as exc:
                raise UnusableOptionError(
                    f"load.attention_backend {options.attention_backend} cannot be used: {exc}"
                ) from exc
        if options.compile:
            model.compile_repeated_blocks(dynamic=True)

    def _modify_vae(self, vae: Any) -> None:
        for is_wanted, name in ((self._options.vae_tiling, "tiling"), (self._options.vae_slicing, "slicing")):
            if is_wanted and not hasattr(vae, f"enable_{name}"):
                raise UnusableOptionError(f"{type(vae).__name__} has no {name}; omit load.vae_{name}")
            if is_wanted:
                getattr(vae, f"enable_{name}")()
        if self._options.channels_last:
            vae.to(memory_format=torch.channels_last)

    def _place(self, components: Any) -> None:
        models = _models(components)
        match self._options.offload:
            case "none":
                components.to(self._device)
            case "model":
                manager = diffusers.ComponentsManager()
                for name, model in models.items():
                    manager.add(name, model)
                manager.enable_auto_cpu_offload(self._device)
            case "group":
                for name, model in models.items():
                    self._offload(name, model, None)
            case "disk":
                disk = self._make_disk_folder()
                # Deletes the folder when the components are garbage collected, and when the process exits.
                weakref.finalize(components, shutil.rmtree, disk, ignore_errors=True)
                for name, model in models.items():
                    _untie(model)
                    self._offload(name, model, disk)

    def _random_models(self, components: Mapping[str, Any]) -> dict[str, Any]:
        """Returns models with random weights by name. Skips components that are not models, such as tokenizers.

        `components` contains the library and the class name of each component.
        """
        models: dict[str, Any] = {}
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            for name, (library, kind, *_) in components.items():
                if library in _LIBRARIES:
                    model = _random_model(getattr(import_module(library), kind), self._folder / name)
                    if model is not None:
                        models[name] = model.to(self._dtype).eval()
        return models

    def _load_file(self, components: Any, name: str, file: Path) -> None:
        """Loads a component's weights from one file. Takes the component's configuration from the folder."""
        if name not in components.component_names:
            raise UnusableOptionError(
                f"load.weights names the component {name!r}; the stage has {', '.join(components.component_names)}"
            )
        kind = components.get_component_spec(name).type_hint
        if not hasattr(kind, "from_single_file"):
            raise UnusableOptionError(f"load.weights.{name}: diffusers reads no single file for {kind.__name__}")
        quantized = {}
        if file.suffix == ".gguf":
            config = diffusers.GGUFQuantizationConfig(compute_dtype=self._dtype)
            quantized = {"quantization_config": config}
        try:
            model = kind.from_single_file(
                str(file), config=str(self._folder / name), dtype=self._dtype, local_files_only=True, **quantized
            )
        except Exception as exc:
            raise NotReadyError(
                f"load.weights.{name}: {file} cannot be loaded as {kind.__name__}: {exc}", reason="LOAD_FAILED"
            ) from exc
        components.register_components(**{name: model})

    def _quantize(self, components: Any, options: QuantizationOptions) -> None:
        for name in set(DENOISERS) & set(components.component_names):
            spec = components.get_component_spec(name)
            try:
                model = spec.load(dtype=self._dtype, quantization_config=_quantization_config(options))
            except (ImportError, RuntimeError, TypeError, ValueError) as exc:
                raise NotReadyError(
                    f"the {name} of {self._folder} cannot be loaded with load.quantization {options.backend}: {exc}",
                    reason="LOAD_FAILED",
                ) from exc
            components.register_components(**{name: model})

    def _offload(self, name: str, model: torch.nn.Module, disk: Path | None) -> None:
        by_block = name in DENOISERS and self._options.offload_by == "block"
        apply_group_offloading(
            model,
            onload_device=self._device,
            offload_device=torch.device("cpu"),
            offload_type="block_level" if by_block else "leaf_level",
            num_blocks_per_group=1 if by_block else None,
            # Transfers the next group while the current group computes.
            use_stream=self._device.type == "cuda",
            offload_to_disk_path=str(disk / name) if disk is not None else None,
        )

    def _make_disk_folder(self) -> Path:
        # A new folder, because diffusers would treat existing files as its own.
        try:
            return Path(tempfile.mkdtemp(prefix="stagemesh-offload-", dir=self._options.offload_dir))
        except OSError as exc:
            raise UnusableOptionError(f"load.offload_dir {self._options.offload_dir} cannot be used: {exc}") from exc


def _models(components: Any) -> dict[str, Any]:
    return {name: model for name, model in components.components.items() if isinstance(model, torch.nn.Module)}


def _untie(model: torch.nn.Module) -> None:
    """Replaces weights that several layers share with a separate copy for each layer. This is needed because diffusers
    writes a shared weight to disk only once.
    """
    seen: set[int] = set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) in seen:
                setattr(module, name, torch.nn.Parameter(parameter.detach().clone(), requires_grad=False))
            seen.add(id(parameter))


def _random_model(kind: Any, folder: Path) -> Any:
    """Returns a model of class `kind` with random weights, or None if `kind` is not a model class.

    The configuration of the model is read from `folder`.
    """
    if not (isinstance(kind, type) and issubclass(kind, torch.nn.Module)):
        return None
    if issubclass(kind, diffusers.ModelMixin):
        config: Any = kind
        return config.from_config(config.load_config(folder, local_files_only=True))
    transformer: Any = kind
    return transformer(transformer.config_class.from_pretrained(folder, local_files_only=True))


def _quantization_config(options: QuantizationOptions) -> Any:
    """Returns diffusers' configuration object for the quantization backend that `options` selects.

    Raises NotReadyError if the backend's module or a required GPU is missing, or if the parameters are invalid.
    """
    kind, module = _QUANTIZATION[options.backend]
    try:
        import_module(module)
    except ImportError as exc:
        raise NotReadyError(
            f"load.quantization {options.backend} needs the module {module}; install it", reason="MISSING_MODULE"
        ) from exc
    if module == "bitsandbytes" and not torch.cuda.is_available():
        raise UnusableOptionError(f"load.quantization {options.backend} needs a GPU; set torchao, or omit it")
    parameters: dict[str, Any] = dict(options.parameters)
    try:
        if options.backend == "torchao":
            parameters["quant_type"] = getattr(import_module("torchao.quantization"), parameters["quant_type"])()
        elif module == "bitsandbytes":
            parameters[f"load_in_{options.backend.removeprefix('bitsandbytes_')}"] = True
        return getattr(diffusers, kind)(**parameters)
    except (TypeError, ValueError, KeyError, AttributeError) as exc:
        raise UnusableOptionError(f"load.quantization.parameters do not fit {kind}: {exc!r}") from exc


class _ImageProcessor(Qwen2VLProcessor):
    """A processor of prompts that contain an image.

    Does not call the base class's constructor, because that requires a video processor and therefore torchvision.
    Stages must not import torchvision.
    """

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.chat_template = None
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id: int = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id: int = tokenizer.convert_tokens_to_ids(self.video_token)


def load_image_processor(folder: Path) -> Any:
    """Loads the processor of prompts that contain an image. `folder` contains the pipeline, in the layout of
    transformers or of diffusers.
    """
    saved = folder / "processor"
    tokenizer: Any = Qwen2Tokenizer
    tokenizer_folder = saved if (saved / "tokenizer_config.json").exists() else folder / "tokenizer"
    image_processor: Any = Qwen2VLImageProcessorPil
    return _ImageProcessor(
        image_processor.from_pretrained(saved, local_files_only=True),
        tokenizer.from_pretrained(tokenizer_folder, local_files_only=True),
    )
