"""What a diffusion stage's `options` hold. Imports nothing of torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from stagemesh.services.engines.diffusion.caches.options import StepCacheOptions
from stagemesh.services.engines.diffusion.model.load_options import LoadOptions
from stagemesh.services.engines.diffusion.parallel.options import ParallelOptions
from stagemesh.services.engines.options import parse_options

Part = Literal["all", "encode", "denoise", "decode"]
"""Which part of a pipeline a stage is: each loads only the folders that it needs."""


@dataclass(frozen=True)
class DiffusionOptions:
    """The options of a diffusion stage."""

    part: Part = "all"
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """What the model computes in."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """`auto` is a GPU where there is one."""
    load: LoadOptions = field(default_factory=LoadOptions)
    """How weights are loaded, and where they lie."""
    enable_lora: bool = False
    """Whether requests may choose LoRA adapters, which operators load and unload."""
    max_loras: int = 8
    """Adapters that may be loaded at once."""
    max_lora_rank: int = 128
    height: int = 1024
    """Of pictures for which a request asks no other; so are the next four."""
    width: int = 1024
    num_frames: int = 1
    num_inference_steps: int = 50
    guidance_scale: float = 4.0
    """Of classifier-free guidance where the model has that, else what the model takes as an input."""
    max_side: int = 2048
    """The largest height and width that a request may ask for, in pixels."""
    max_frames: int = 1
    """More than 1 for models that make films."""
    max_inference_steps: int = 200
    max_prompt_characters: int = 20_000
    max_running: int = 16
    """Requests that are denoised in turn; more wait, unencoded."""
    max_batch: int = 8
    """Requests that may share a forward, where that pays; 1 for results that never depend on who else is there."""
    max_wait_steps: int = 8
    """A request that runs waits for so many steps of others at most, and for those that have waited longer."""
    memory_bytes: int | None = None
    """What requests may take beside the weights; None for what is free once the weights are loaded."""
    checkpoint_steps: int = 0
    """Steps between two checkpoints; 0 for none."""
    preview_steps: int = 0
    """Steps between two intermediate pictures, or latents on the edge to the decoder; 0 for none."""
    prompt_cache_bytes: int = 256 << 20
    """What the embeddings of prompts that may come again may take; 0 to encode each anew."""
    step_cache: StepCacheOptions | None = None
    """What of a step is taken from the one before: faster, and another picture. None to compute all."""
    profile_dir: str | None = None
    """The folder within which profiles may be put, absolute; None for no profiles."""
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    """The processes that denoise together."""

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
        if self.enable_lora and self.part in {"encode", "decode"}:
            raise ValueError(f"enable_lora is for stages that denoise; this is the part {self.part}: leave it out")
        if self.load.changes_weights and (self.enable_lora or self.parallel.ranks > 1):
            raise ValueError(
                "enable_lora and parallel need a transformer whose weights are whole and on its device; leave "
                "load.offload, load.layerwise_casting and load.quantization out"
            )
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
        self._check_parallel()

    def _check_parallel(self) -> None:
        if self.parallel.ranks > 1 and self.part not in {"all", "denoise"}:
            raise ValueError(f"parallel is for stages that denoise; this is the part {self.part}: leave it out")
        if self.enable_lora and self.parallel.hsdp > 1:
            raise ValueError("enable_lora stands beside parallel.hsdp; adapters need a model whose weights are whole")
        if self.step_cache is not None and (self.parallel.cfg > 1 or self.parallel.ulysses > 1):
            raise ValueError(
                "step_cache stands beside parallel.cfg or parallel.ulysses; each rank would decide by its own part of "
                "a step: leave one of them out"
            )


def stage_options(options: Mapping[str, JsonValue], *, stage: str = "") -> DiffusionOptions:
    """A stage's options; raises InvalidRequestError naming the one at fault."""
    return parse_options(DiffusionOptions, options, stage=stage)
