"""The options of a diffusion stage. This module does not import torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import ConfigDict, JsonValue

from stagemesh.services.engines.diffusion.caches.step_cache_options import StepCacheOptions
from stagemesh.services.engines.diffusion.model.load_options import LoadOptions
from stagemesh.services.engines.options import parse_options

Part = Literal["all", "encode", "denoise", "decode"]
"""The part of a pipeline that a stage runs. A stage loads only the model components that its part needs."""
_GUIDANCE_BRANCHES = 2


@dataclass(frozen=True)
class ParallelOptions:
    """Degrees of parallelism, as numbers of processes that denoise together. If all are 1, the stage uses a single
    process."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    cfg: int = 1
    """Number of guidance branches that are computed in parallel, each by a separate group of processes. Must be 1 or
    2."""
    ulysses: int = 1
    """Number of processes that split each forward pass (Ulysses sequence parallelism). Each process computes a part of
    the tokens and, in attention, a part of the heads."""
    hsdp: int = 1
    """Number of processes across which the transformer's weights are sharded. Each process stores one shard, and
    fetches the other shards of a block when it computes the block."""

    def __post_init__(self) -> None:
        for name in ("cfg", "ulysses", "hsdp"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name} is {getattr(self, name)}; it must be at least 1")
        if self.cfg > _GUIDANCE_BRANCHES:
            raise ValueError(f"parallel.cfg is {self.cfg}; guidance has two branches, so it must be 1 or 2")
        if self.ulysses > 1 and self.ulysses % self.hsdp:
            raise ValueError(
                f"parallel.hsdp is {self.hsdp}; it must divide parallel.ulysses ({self.ulysses}), because the "
                "processes of one guidance branch share the weights"
            )

    @property
    def branch_ranks(self) -> int:
        """Number of processes that compute one guidance branch."""
        return max(self.ulysses, self.hsdp)

    @property
    def ranks(self) -> int:
        """Total number of processes of the stage."""
        return self.cfg * self.branch_ranks


@dataclass(frozen=True)
class DiffusionOptions:
    """Options of a diffusion stage, including the defaults of the request options."""

    part: Part = "all"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Data type in which the model computes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device on which the model computes. `auto` selects a GPU if the machine has one, otherwise the CPU."""
    load: LoadOptions = field(default_factory=LoadOptions)
    """Options for loading and storing the weights."""
    enable_lora: bool = False
    """Whether requests may select a LoRA adapter. Operators load and unload the adapters."""
    max_loras: int = 8
    """Maximum number of LoRA adapters that are loaded at the same time."""
    max_lora_rank: int = 128
    height: int = 1024
    """Default image height in pixels. A request may override `height`, `width`, `num_frames`, `num_inference_steps` and
    `guidance_scale`."""
    width: int = 1024
    num_frames: int = 1
    num_inference_steps: int = 50
    guidance_scale: float = 4.0
    """Default scale of classifier-free guidance, or default of the guidance input for models that have such an
    input."""
    max_side: int = 2048
    """Maximum height and maximum width of an image, in pixels."""
    max_frames: int = 1
    """Maximum number of frames in a request. Must be greater than 1 to generate videos."""
    max_inference_steps: int = 200
    max_prompt_characters: int = 20_000
    max_running: int = 16
    """Maximum number of requests whose denoising steps alternate. Further requests wait before they are encoded."""
    max_batch: int = 8
    """Maximum number of requests in one forward pass. If 1, a request's result does not depend on other requests."""
    max_wait_steps: int = 8
    """Number of steps for which other requests may take precedence over a waiting request."""
    memory_bytes: int | None = None
    """Maximum memory of all requests in addition to the weights, in bytes. None means all memory that is free after the
    weights are loaded."""
    checkpoint_steps: int = 0
    """Number of steps from one checkpoint to the next. 0 disables checkpoints."""
    preview_steps: int = 0
    """Number of steps from one preview to the next. 0 disables previews.

    A preview contains images or a video, or latents if the stage only denoises.
    """
    prompt_cache_bytes: int = 256 << 20
    """Maximum size of the cache of prompt embeddings, in bytes. 0 disables the cache."""
    step_cache: StepCacheOptions | None = None
    """Options of the step cache, which reuses results of previous steps. It makes steps faster but changes the
    generated image. None disables the step cache."""
    profile_dir: str | None = None
    """Absolute path of the folder in which profiles are written. None disables profiling."""
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    """Number of processes for each kind of parallelism."""

    def __post_init__(self) -> None:
        for name in (
            "max_side",
            "max_frames",
            "max_inference_steps",
            "max_prompt_characters",
            "max_running",
            "max_batch",
            "max_loras",
            "max_lora_rank",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for name in ("max_wait_steps", "checkpoint_steps", "preview_steps", "prompt_cache_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 0")
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
    """Parses the options of a stage. Raises InvalidRequestError if an option is invalid. The error names the option."""
    return parse_options(DiffusionOptions, options, stage=stage)
