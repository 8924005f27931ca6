"""How much of something: a number, or a distribution from which a request's seed draws."""

import hashlib
import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, TypeAlias, cast

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field

Number: TypeAlias = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]

_MAX_SIGMA = 10
"""Of the logarithm; beyond it, no draw is of any use, and soon none is finite."""


@dataclass(frozen=True)
class Amount:
    """One of these; in options a plain number is a fixed amount."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    fixed: Number | None = None
    uniform: tuple[Number, Number] | None = None
    """From the first to the second."""
    exponential: Number | None = None
    """With this mean."""
    lognormal: tuple[Number, Number] | None = None
    """With this median, and this standard deviation of the logarithm."""
    one_of: Annotated[tuple[Number, ...], Field(min_length=1)] | None = None
    """Each as probable as any other."""

    def __post_init__(self) -> None:
        given = (self.fixed, self.uniform, self.exponential, self.lognormal, self.one_of)
        if sum(kind is not None for kind in given) != 1:
            raise ValueError(f"give {_FORMS}")
        if self.uniform is not None and self.uniform[0] > self.uniform[1]:
            raise ValueError("uniform goes from the lower number to the higher one")
        if self.lognormal is not None and self.lognormal[1] > _MAX_SIGMA:
            raise ValueError(f"lognormal's second number is a deviation of the logarithm, at most {_MAX_SIGMA}")

    def at(self, quantile: float) -> float:
        """The amount that this part of all draws, over 0 and under 1, stays under."""
        if self.uniform is not None:
            low, high = self.uniform
            return low + (high - low) * quantile
        if self.exponential is not None:
            return -self.exponential * math.log1p(-quantile)
        if self.lognormal is not None:
            median, sigma = self.lognormal
            return median * math.exp(sigma * NormalDist().inv_cdf(quantile))
        if self.one_of is not None:
            return self.one_of[int(quantile * len(self.one_of))]
        assert self.fixed is not None, "one is given"
        return self.fixed

    @property
    def mean(self) -> float:
        """What many draws come to, on average."""
        if self.uniform is not None:
            return sum(self.uniform) / 2
        if self.exponential is not None:
            return self.exponential
        if self.lognormal is not None:
            median, sigma = self.lognormal
            return median * math.exp(sigma * sigma / 2)
        if self.one_of is not None:
            return sum(self.one_of) / len(self.one_of)
        assert self.fixed is not None, "one is given"
        return self.fixed


_FORMS = "a number, or one of uniform, exponential, lognormal, one_of"


def _from_number(value: object) -> object:
    if isinstance(value, int | float):
        return {"fixed": value}
    if not isinstance(value, dict | Amount):
        raise ValueError(f"it must be {_FORMS}")  # noqa: TRY004 - pydantic tells a ValueError apart
    return cast("object", value)


def _whole(amount: Amount) -> Amount:
    if amount.fixed is not None and not amount.fixed.is_integer():
        raise ValueError("it must be a whole number")
    return amount


AmountOption: TypeAlias = Annotated[Amount, BeforeValidator(_from_number)]
CountOption: TypeAlias = Annotated[Amount, BeforeValidator(_from_number), AfterValidator(_whole)]
"""A number of things: draws are rounded."""


@dataclass(frozen=True)
class SeededRandom:
    """Draws that depend on the request's seed, the stage and what is drawn, and on nothing else."""

    seed: int
    stage: str

    def quantile(self, *what: str | int) -> float:
        """A number over 0 and under 1, evenly spread."""
        digest = hashlib.blake2b(repr((self.seed, self.stage, what)).encode(), digest_size=8).digest()
        # As many bits as a float holds beside the half, so that none is rounded up to 1.
        return ((int.from_bytes(digest) >> 12) + 0.5) / (1 << 52)

    def draw(self, amount: Amount, *what: str | int) -> float:
        """An amount."""
        return amount.fixed if amount.fixed is not None else amount.at(self.quantile(*what))

    def count(self, amount: Amount, *what: str | int) -> int:
        """An amount of things."""
        return round(self.draw(amount, *what))
