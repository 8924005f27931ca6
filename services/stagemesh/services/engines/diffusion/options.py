"""The options of a diffusion stage. This module does not import torch."""

from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, JsonValue, NonNegativeFloat, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from stagemesh.services.engines.options import parse_options

Part = Literal["all", "encode", "denoise", "decode"]
"""The part of a pipeline that a stage runs. A stage loads only the model components that its part needs."""
_STRICT = ConfigDict(extra="forbid")


@dataclass(frozen=True, config=_STRICT)
class QuantizationOptions:
    """Quantization of the transformers' weights by one of the libraries that diffusers supports.

    The library must be installed in addition to Stagemesh.
    """

    backend: Literal["torchao", "bitsandbytes_4bit", "bitsandbytes_8bit", "quanto", "modelopt"]
    parameters: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Arguments for the backend's configuration class in diffusers. For torchao, `quant_type` is the name of a class in
    torchao.quantization, such as Int8WeightOnlyConfig."""


@dataclass(frozen=True, config=_STRICT)
class LoadOptions:
    """Options for loading a pipeline's weights, and for storing the weights while they are not in use."""

    format: Literal["default", "dummy", "custom_pipeline"] = "default"
    """How the pipeline is loaded. `default` reads the model's files. `dummy` generates reproducible random weights, for
    speed tests. `custom_pipeline` runs the pipeline with the class that the option `custom_pipeline` names."""
    custom_pipeline: str | None = None
    """Class of a custom pipeline as "module:Class", or None for the built-in class. The class must be a subclass of
    `modular_pipeline.ModularStepPipeline` with the same constructor."""
    offload: Literal["none", "model", "group", "disk"] = "none"
    """Where weights are stored while they are not in use. `none`: on the device. `model`: in host memory, transferred
    to the device one model at a time (needs a GPU). `group`: in host memory, transferred to the device one group of
    layers at a time. `disk`: in files, read one group of layers at a time."""
    offload_by: Literal["leaf", "block"] = "leaf"
    """Size of the transformer's offload groups: a single layer (`leaf`) or a transformer block (`block`). Blocks are
    faster but use more device memory."""
    offload_dir: str | None = None
    """Folder in which each process creates its own folder for offloaded weights if `offload` is `disk`. None selects
    the system's temporary folder."""
    layerwise_casting: Literal["none", "float8_e4m3fn", "float8_e5m2"] = "none"
    """Data type in which the transformer's weights are stored. The weights of a layer are converted to the data type
    `dtype` while the layer computes. The conversion loses some precision. `none` disables the conversion."""
    quantization: QuantizationOptions | None = None
    weights: Mapping[str, str] = field(default_factory=dict[str, str])
    """Files with the weights of single components, as absolute paths by the component's name. The files are in the
    format safetensors or GGUF, with the names of diffusers or of the model's authors. The folder still contains the
    components' configurations. A GGUF file's weights remain quantized, and are expanded while a layer computes."""
    vae_tiling: bool = False
    """Whether the VAE encodes and decodes large images and videos in overlapping tiles. This uses less memory and
    changes the result slightly."""
    vae_slicing: bool = False
    """Whether the VAE decodes one image of a batch at a time. This uses less memory."""
    attention_backend: str | None = None
    """Name of diffusers' implementation of attention for the transformer, such as `native`, `flash` or `sage`. None
    selects diffusers' default."""
    channels_last: bool = False
    """Whether the VAE's weights are stored with the channels as the last axis, which is faster on some GPUs."""
    compile: bool = False
    """Whether the transformer's blocks are compiled. Compilation changes the results by rounding errors."""
    warmup_sizes: tuple[tuple[PositiveInt, PositiveInt], ...] = ()
    """Heights and widths in pixels for which the stage runs one request of two steps before it is ready. Compiled
    blocks are then fast from the first request of such a size."""

    def __post_init__(self) -> None:
        for name, file in self.weights.items():
            if not Path(file).is_absolute() or Path(file).suffix not in {".safetensors", ".gguf"}:
                raise ValueError(
                    f"load.weights.{name} is {file!r}; it must be the absolute path of a .safetensors or .gguf file"
                )
        if self.weights and (self.format == "dummy" or self.quantization is not None):
            raise ValueError("load.weights excludes load.format dummy and load.quantization; omit one of them")
        if (self.format == "custom_pipeline") != (self.custom_pipeline is not None):
            raise ValueError("set load.custom_pipeline if, and only if, load.format is custom_pipeline")
        if self.quantization is not None:
            for name, value in (("layerwise_casting", self.layerwise_casting), ("format", self.format)):
                if value not in {"none", "default"}:
                    raise ValueError(f"load.quantization excludes load.{name} {value}; omit one of them")
            if self.offload == "disk":
                raise ValueError("load.quantization excludes load.offload disk; set group, or omit one of them")

    @property
    def changes_weights(self) -> bool:
        """Whether these options modify the transformer's weights, or store some of the weights outside the device."""
        is_quantized = self.quantization is not None or any(file.endswith(".gguf") for file in self.weights.values())
        return self.offload in {"group", "disk"} or self.layerwise_casting != "none" or is_quantized


@dataclass(frozen=True, config=_STRICT)
class FirstBlockOptions:
    """Options of FirstBlockCache. This step cache skips the other transformer blocks of a step if the first block's
    output has changed little.
    """

    kind: Literal["first_block"]
    threshold: NonNegativeFloat = 0.05
    """Maximum mean relative change of the first block's residual for which the other blocks are skipped. 0.05 means 5
    percent."""


@dataclass(frozen=True, config=_STRICT)
class MagOptions:
    """Options of MagCache. This step cache skips a step if the model's residuals are expected to change little."""

    kind: Literal["mag"]
    threshold: NonNegativeFloat = 0.06
    """Maximum estimated relative error that may accumulate over consecutive skipped steps. 0.06 means 6 percent."""
    max_skip_steps: PositiveInt = 3
    """Maximum number of consecutive skipped steps."""
    retention_ratio: Annotated[float, Field(ge=0, le=1)] = 0.2
    """Fraction of the request's steps that are always computed, beginning with the first step. From 0 to 1."""
    mag_ratios: tuple[float, ...] = ()
    """Ratios of the residual's magnitude between consecutive steps, as measured by diffusers' MagCache with
    `calibrate`. The measurement may use any number of steps. If the tuple is empty, diffusers' own ratios are used.
    diffusers has such ratios only for Flux."""


@dataclass(frozen=True, config=_STRICT)
class TaylorSeerOptions:
    """Options of TaylorSeer. This step cache extrapolates attention outputs between computed steps."""

    kind: Literal["taylor_seer"]
    cache_interval: PositiveInt = 5
    """Number of steps from one computed step to the next. With a value of n, every n-th step is computed."""
    disable_cache_before_step: PositiveInt = 3
    """Number of initial steps that are always computed."""
    disable_cache_after_step: int | None = None
    """Index of the step from which on every step is computed. None if steps may be skipped until the last step."""
    max_order: NonNegativeInt = 1
    """Order of the Taylor series for the extrapolation. A higher order is more accurate but uses more memory."""


@dataclass(frozen=True, config=_STRICT)
class CacheDitOptions:
    """Options of DBCache, a step cache from the package cache-dit. DBCache extends FirstBlockCache to several first and
    last blocks.
    """

    kind: Literal["cache_dit"]
    first_blocks: PositiveInt = 1
    """Number of blocks at the start of the transformer that are computed in every step. The subsequent blocks are
    skipped if the residual of the first blocks changes little."""
    last_blocks: NonNegativeInt = 0
    """Number of blocks at the end of the transformer that are computed in every step."""
    threshold: NonNegativeFloat = 0.08
    """Maximum mean relative change of the first blocks' residual for which the other blocks are skipped. 0.08 means 8
    percent."""
    warmup_steps: NonNegativeInt = 8
    """Number of initial steps that are always computed."""
    max_skip_steps: Annotated[int, Field(ge=-1)] = -1
    """Maximum number of consecutive skipped steps. -1 means no limit."""


DiffusersCacheOptions: TypeAlias = FirstBlockOptions | MagOptions | TaylorSeerOptions
StepCacheOptions: TypeAlias = Annotated[DiffusersCacheOptions | CacheDitOptions, Field(discriminator="kind")]


@dataclass(frozen=True, config=_STRICT)
class ParallelOptions:
    """Degrees of parallelism. Each degree is a number of processes that denoise together. If all degrees are 1, the
    stage uses a single process.
    """

    cfg: Annotated[int, Field(ge=1, le=2)] = 1
    """Number of guidance branches that are computed in parallel, each by a separate group of processes. Must be 1 or 2,
    because guidance has two branches."""
    ulysses: PositiveInt = 1
    """Number of processes that split each forward pass (Ulysses sequence parallelism). Each process computes a part of
    the tokens and, in attention, a part of the heads."""
    hsdp: PositiveInt = 1
    """Number of processes across which the transformer's weights are sharded. Each process stores one shard of each
    block, and fetches the other shards of a block when it computes the block."""

    def __post_init__(self) -> None:
        if self.ulysses > 1 and self.ulysses % self.hsdp:
            raise ValueError(
                f"parallel.hsdp is {self.hsdp}; it must divide parallel.ulysses ({self.ulysses}), because the "
                "processes of one guidance branch share the weights"
            )

    @property
    def branch_ranks(self) -> int:
        """Number of processes that compute one guidance branch together."""
        return max(self.ulysses, self.hsdp)

    @property
    def ranks(self) -> int:
        """Total number of processes of the stage that compute the model."""
        return self.cfg * self.branch_ranks


@dataclass(frozen=True, config=_STRICT)
class DiffusionOptions:
    """Options of a diffusion stage, including the defaults of the request options."""

    part: Part = "all"
    blocks: tuple[str, ...] = ()
    """Names of the diffusers blocks within the part that the stage runs, such as `audio_decode`. Empty for all of them.
    The blocks of a part can therefore run as several stages."""
    audio_rate_hz: NonNegativeInt = 0
    """Sampling rate of the audio that the model generates, in Hz. The stage then emits the tensor `audio`. 0 if the
    stage emits no audio."""
    text: bool = False
    """Whether the stage emits the text that the model generates, as the tensor `text`, instead of images. Set it only
    for models that generate text."""
    arguments: Mapping[str, bool | int | float | str] = field(default_factory=dict[str, bool | int | float | str])
    """Further arguments of the pipeline, such as `strength`, with their default values. A request may override them.
    Only for pipelines without a modular form in diffusers."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type in which the model computes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device on which the model computes. `auto` selects a GPU if the machine has one, otherwise the CPU."""
    load: LoadOptions = field(default_factory=LoadOptions)
    """Options for loading and storing the model's weights."""
    enable_lora: bool = False
    """Whether requests may select a LoRA adapter. Operators load and unload the adapters."""
    max_loras: PositiveInt = 8
    """Maximum number of LoRA adapters that are loaded at the same time."""
    max_lora_rank: PositiveInt = 128
    height: int = 1024
    """Default height of an image in pixels. A request may override the defaults of `height`, `width`, `num_frames`,
    `num_inference_steps` and `guidance_scale`."""
    width: int = 1024
    sizes: Literal["round", "strict"] = "round"
    """Treatment of a size that the model does not take. `round` rounds the size down and warns the caller. `strict`
    rejects the request."""
    num_frames: int = 1
    num_inference_steps: int = 50
    guidance_scale: float = 4.0
    """Default scale of classifier-free guidance. For models with a guidance input, the default value of that input."""
    max_side: PositiveInt = 2048
    """Maximum height and maximum width of an image, in pixels."""
    max_frames: PositiveInt = 1
    """Maximum number of frames that a request may generate. Must be greater than 1 to generate videos."""
    max_inference_steps: PositiveInt = 200
    max_prompt_characters: PositiveInt = 20_000
    max_running: PositiveInt = 16
    """Maximum number of requests whose denoising steps alternate. Further requests wait before their prompts are
    encoded."""
    max_batch: PositiveInt = 8
    """Maximum number of requests that share one forward pass. With a value of 1, a request's result does not depend on
    other requests."""
    max_wait_steps: NonNegativeInt = 8
    """Number of steps that a request waits for other requests before it takes precedence over them."""
    memory_bytes: int | None = None
    """Maximum memory in bytes for all requests together, excluding the weights. None means all memory that is free
    after the weights are loaded."""
    checkpoint_steps: NonNegativeInt = 0
    """Number of steps from one checkpoint to the next. 0 disables checkpoints."""
    preview_steps: NonNegativeInt = 0
    """Number of steps from one preview to the next. 0 disables previews.

    A preview contains images or a video. If the stage only denoises, the preview contains latents instead."""
    prompt_cache_bytes: NonNegativeInt = 256 << 20
    """Maximum size of the cache of prompt embeddings, in bytes. 0 disables the cache."""
    step_cache: StepCacheOptions | None = None
    """Options of the step cache, which reuses results of previous steps. A step cache makes steps faster but changes
    the generated image. If None, the stage does not use a step cache."""
    profile_dir: str | None = None
    """Absolute path of the folder in which profiles are written. None disables profiling."""
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    """Degrees of parallelism of the stage's processes."""

    def __post_init__(self) -> None:
        for name, limit in (
            ("height", self.max_side),
            ("width", self.max_side),
            ("num_frames", self.max_frames),
            ("num_inference_steps", self.max_inference_steps),
        ):
            if not 1 <= getattr(self, name) <= limit:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be from 1 to {limit}")
        if self.profile_dir is not None and not Path(self.profile_dir).is_absolute():
            raise ValueError(f"profile_dir is {self.profile_dir!r}; it must be an absolute path")
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.load.warmup_sizes and self.part != "all":
            raise ValueError(f"load.warmup_sizes is for stages with part all; this stage has part {self.part}; omit it")
        if self.enable_lora and self.part in {"encode", "decode"}:
            raise ValueError(f"enable_lora is for stages that denoise; this stage has part {self.part}; omit it")
        if self.load.changes_weights and (self.enable_lora or self.parallel.ranks > 1):
            raise ValueError(
                "enable_lora and parallel need a transformer whose weights are complete and on its device; omit "
                "load.offload, load.layerwise_casting and load.quantization"
            )
        if self.parallel.ranks > 1 and self.part not in {"all", "denoise"}:
            raise ValueError(f"parallel is for stages that denoise; this stage has part {self.part}; omit it")
        if self.enable_lora and self.parallel.hsdp > 1:
            raise ValueError(
                "enable_lora excludes parallel.hsdp, because adapters need a model whose weights are complete; omit one"
            )
        if self.step_cache is not None and (self.parallel.cfg > 1 or self.parallel.ulysses > 1):
            raise ValueError(
                "step_cache excludes parallel.cfg and parallel.ulysses, because each rank would decide from its own "
                "part of a step; omit one of them"
            )


def stage_options(options: Mapping[str, JsonValue], *, stage: str = "") -> DiffusionOptions:
    """Parses the options of a diffusion stage. `stage` is the stage's name in errors.

    Raises InvalidRequestError if an option is invalid. The error names the option.
    """
    return parse_options(DiffusionOptions, options, stage=stage)
