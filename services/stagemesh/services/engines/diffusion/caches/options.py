"""A stage's option `step_cache`. Imports nothing of torch.

A step cache leaves out what it takes to differ little from the step before: it saves time and changes the picture.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, Field


@dataclass(frozen=True)
class FirstBlockOptions:
    """FirstBlockCache: where the first block changes little from step to step, the others are not run."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["first_block"]
    threshold: float = 0.05
    """The mean change of the first block's residual, as a part of the residual, up to which the others are left out."""

    def __post_init__(self) -> None:
        _check("threshold", self.threshold, minimum=0)


@dataclass(frozen=True)
class MagOptions:
    """MagCache: where the model's residuals are known to change little, a step is not computed."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["mag"]
    threshold: float = 0.06
    """The error that may add up while steps are left out."""
    max_skip_steps: int = 3
    """Steps that are left out in a row, at most."""
    retention_ratio: float = 0.2
    """The part of the steps, from the first on, of which none is left out."""
    mag_ratios: tuple[float, ...] = ()
    """By how much the residual grows from step to step: the model's own, measured by diffusers' MagCache with
    `calibrate`, over any number of steps. Empty for those that diffusers knows, which are Flux's."""

    def __post_init__(self) -> None:
        _check("threshold", self.threshold, minimum=0)
        _check("max_skip_steps", self.max_skip_steps, minimum=1)
        if not 0 <= self.retention_ratio <= 1:
            raise ValueError(f"retention_ratio is {self.retention_ratio}; it must be from 0 to 1")


@dataclass(frozen=True)
class TaylorSeerOptions:
    """TaylorSeer: between two computed steps, what attention gives is extrapolated."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["taylor_seer"]
    cache_interval: int = 5
    """Of so many steps one is computed."""
    disable_cache_before_step: int = 3
    """The first steps are all computed."""
    disable_cache_after_step: int | None = None
    """So are those from this one on; None for none."""
    max_order: int = 1
    """Of the series; higher is closer, and takes more memory."""

    def __post_init__(self) -> None:
        _check("cache_interval", self.cache_interval, minimum=1)
        _check("disable_cache_before_step", self.disable_cache_before_step, minimum=1)
        _check("max_order", self.max_order, minimum=0)


@dataclass(frozen=True)
class CacheDitOptions:
    """DBCache, of the package cache-dit: as FirstBlockCache, with any number of blocks that are always run."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["cache_dit"]
    first_blocks: int = 1
    """Blocks at the beginning that are always run, and tell whether the rest is."""
    last_blocks: int = 0
    """Blocks at the end that are always run."""
    threshold: float = 0.08
    """The mean change of the first blocks' residual up to which the others are left out."""
    warmup_steps: int = 8
    """The first steps are all computed."""
    max_skip_steps: int = -1
    """Steps that are left out in a row, at most; -1 for any number."""

    def __post_init__(self) -> None:
        _check("first_blocks", self.first_blocks, minimum=1)
        _check("last_blocks", self.last_blocks, minimum=0)
        _check("threshold", self.threshold, minimum=0)
        _check("warmup_steps", self.warmup_steps, minimum=0)
        _check("max_skip_steps", self.max_skip_steps, minimum=-1)


DiffusersCacheOptions: TypeAlias = FirstBlockOptions | MagOptions | TaylorSeerOptions
StepCacheOptions: TypeAlias = Annotated[DiffusersCacheOptions | CacheDitOptions, Field(discriminator="kind")]


def _check(name: str, value: float, *, minimum: int) -> None:
    # Written so that what is no number fails too.
    if not value >= minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}")
