"""The stage option `step_cache`. This module does not import torch.

A step cache skips computations whose results are expected to differ little from the results of the previous step.
Skipping makes steps faster but changes the generated image.
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, Field


@dataclass(frozen=True)
class FirstBlockOptions:
    """Options of FirstBlockCache, which skips all later transformer blocks in a step if the first block's output has
    changed little."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["first_block"]
    threshold: float = 0.05
    """Maximum mean relative change of the first block's residual at which the other blocks are skipped. 0.05 means 5
    %."""

    def __post_init__(self) -> None:
        _check("threshold", self.threshold, minimum=0)


@dataclass(frozen=True)
class MagOptions:
    """Options of MagCache, which skips a step if the model's residuals are expected to change little."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["mag"]
    threshold: float = 0.06
    """Maximum estimated relative error that consecutive skipped steps may accumulate. 0.06 means 6 %."""
    max_skip_steps: int = 3
    """Maximum number of consecutive skipped steps."""
    retention_ratio: float = 0.2
    """Fraction of the steps, counted from the first step, that are always computed."""
    mag_ratios: tuple[float, ...] = ()
    """Ratios of the residual's magnitude between consecutive steps, as measured by diffusers' MagCache with
    `calibrate`. The measurement may use any number of steps. If the tuple is empty, diffusers' own ratios are used,
    which exist only for Flux."""

    def __post_init__(self) -> None:
        _check("threshold", self.threshold, minimum=0)
        _check("max_skip_steps", self.max_skip_steps, minimum=1)
        if not 0 <= self.retention_ratio <= 1:
            raise ValueError(f"retention_ratio is {self.retention_ratio}; it must be from 0 to 1")


@dataclass(frozen=True)
class TaylorSeerOptions:
    """Options of TaylorSeer, which extrapolates attention outputs between computed steps."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["taylor_seer"]
    cache_interval: int = 5
    """Number of steps from one computed step to the next. With n, every n-th step is computed."""
    disable_cache_before_step: int = 3
    """Number of initial steps that are always computed."""
    disable_cache_after_step: int | None = None
    """Index of the step from which every step is computed. None if steps are skipped until the end."""
    max_order: int = 1
    """Order of the Taylor series that extrapolates. A higher order is more accurate and uses more memory."""

    def __post_init__(self) -> None:
        _check("cache_interval", self.cache_interval, minimum=1)
        _check("disable_cache_before_step", self.disable_cache_before_step, minimum=1)
        _check("max_order", self.max_order, minimum=0)


@dataclass(frozen=True)
class CacheDitOptions:
    """Options of DBCache from the package cache-dit. DBCache extends FirstBlockCache to several first and last
    blocks."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid")

    kind: Literal["cache_dit"]
    first_blocks: int = 1
    """Number of first blocks, which run at every step. The other blocks are skipped if the first blocks' residual
    changes little."""
    last_blocks: int = 0
    """Number of last blocks, which run at every step."""
    threshold: float = 0.08
    """Maximum mean relative change of the first blocks' residual at which the other blocks are skipped. 0.08 means 8
    %."""
    warmup_steps: int = 8
    """Number of initial steps that are always computed."""
    max_skip_steps: int = -1
    """Maximum number of consecutive skipped steps. -1 means no limit."""

    def __post_init__(self) -> None:
        _check("first_blocks", self.first_blocks, minimum=1)
        _check("last_blocks", self.last_blocks, minimum=0)
        _check("threshold", self.threshold, minimum=0)
        _check("warmup_steps", self.warmup_steps, minimum=0)
        _check("max_skip_steps", self.max_skip_steps, minimum=-1)


DiffusersCacheOptions: TypeAlias = FirstBlockOptions | MagOptions | TaylorSeerOptions
StepCacheOptions: TypeAlias = Annotated[DiffusersCacheOptions | CacheDitOptions, Field(discriminator="kind")]


def _check(name: str, value: float, *, minimum: int) -> None:
    # Not `value < minimum`, so that NaN is rejected too.
    if not value >= minimum:
        raise ValueError(f"{name} is {value}; it must be at least {minimum}")
