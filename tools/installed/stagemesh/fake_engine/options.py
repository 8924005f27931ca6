"""The options of a fake stage. A numeric option is a fixed number, or a distribution that is sampled
deterministically.
"""

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Annotated, Literal, TypeAlias, cast

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, JsonValue

from stagemesh.services.engines.options import parse_options

Number: TypeAlias = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=0)]
FaultKind: TypeAlias = Literal["error", "hang", "slow", "exit", "disorder"]

_MAX_SIGMA = 10
"""The maximum standard deviation of the logarithm in a log-normal distribution.

With larger values, samples become too large to be useful, and finally infinite.
"""


@dataclass(frozen=True)
class Amount:
    """A numeric option: a fixed number or a distribution. Exactly one field is set.

    In a stage's options, a plain number is a fixed amount.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    fixed: Number | None = None
    uniform: tuple[Number, Number] | None = None
    """The minimum and the maximum of a uniform distribution, or None if the amount is of another kind."""
    exponential: Number | None = None
    """The mean of an exponential distribution, or None if the amount is of another kind."""
    lognormal: tuple[Number, Number] | None = None
    """The median of a log-normal distribution, and the standard deviation of its logarithm.

    None if the amount is of another kind.
    """
    one_of: Annotated[tuple[Number, ...], Field(min_length=1)] | None = None
    """The values of a discrete distribution, which are equally probable, or None if the amount is of
    another kind.
    """

    def __post_init__(self) -> None:
        given = (self.fixed, self.uniform, self.exponential, self.lognormal, self.one_of)
        if sum(kind is not None for kind in given) != 1:
            raise ValueError(f"give {_FORMS}")
        if self.uniform is not None and self.uniform[0] > self.uniform[1]:
            raise ValueError("uniform must be the lower number, then the higher number")
        if self.lognormal is not None and self.lognormal[1] > _MAX_SIGMA:
            raise ValueError(f"lognormal's second number is a deviation of the logarithm, at most {_MAX_SIGMA}")

    def at(self, quantile: float) -> float:
        """Returns the amount's value at a quantile. The quantile must be greater than 0 and less than 1."""
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
        assert self.fixed is not None, "exactly one field is set"
        return self.fixed

    @property
    def mean(self) -> float:
        """The mean of the distribution, or the fixed number."""
        if self.uniform is not None:
            return sum(self.uniform) / 2
        if self.exponential is not None:
            return self.exponential
        if self.lognormal is not None:
            median, sigma = self.lognormal
            return median * math.exp(sigma * sigma / 2)
        if self.one_of is not None:
            return sum(self.one_of) / len(self.one_of)
        assert self.fixed is not None, "exactly one field is set"
        return self.fixed


_FORMS = "a number, or one of uniform, exponential, lognormal, one_of"


def _from_number(value: object) -> object:
    if isinstance(value, int | float):
        return {"fixed": value}
    if not isinstance(value, dict | Amount):
        raise ValueError(f"it must be {_FORMS}")  # noqa: TRY004 - pydantic reports ValueError only
    return cast("object", value)


def _whole(amount: Amount) -> Amount:
    if amount.fixed is not None and not amount.fixed.is_integer():
        raise ValueError("it must be a whole number")
    return amount


AmountOption: TypeAlias = Annotated[Amount, BeforeValidator(_from_number)]
CountOption: TypeAlias = Annotated[Amount, BeforeValidator(_from_number), AfterValidator(_whole)]
"""An amount that is a whole number. A fixed amount must be a whole number. Samples of a distribution are rounded."""


@dataclass(frozen=True)
class SeededRandom:
    """A random generator whose samples depend only on the request's seed, the stage's name, and the sample's key."""

    seed: int
    stage: str

    def quantile(self, *key: str | int) -> float:
        """Returns a number between 0 and 1 (both exclusive) for `key`.

        The numbers of different keys are uniformly distributed.
        """
        digest = hashlib.blake2b(repr((self.seed, self.stage, key)).encode(), digest_size=8).digest()
        # 52 bits and the added half fit in a float, so the result is never rounded up to 1.
        return ((int.from_bytes(digest) >> 12) + 0.5) / (1 << 52)

    def draw(self, amount: Amount, *key: str | int) -> float:
        """Samples an amount. The same key always yields the same sample."""
        return amount.fixed if amount.fixed is not None else amount.at(self.quantile(*key))

    def count(self, amount: Amount, *key: str | int) -> int:
        """Samples an amount and rounds the sample to a whole number. The same key always yields the same sample."""
        return round(self.draw(amount, *key))


_NONE, _ONE, _FOUR = Amount(fixed=0), Amount(fixed=1), Amount(fixed=4)


@dataclass(frozen=True)
class Fault:
    """A fault that affects some requests, chosen by their seeds."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: FaultKind
    """The effect of the fault:

    - `error`: the stage fails the request.
    - `hang`: the task makes no further progress.
    - `slow`: each further step takes `slow_s` longer.
    - `exit`: SIGKILL terminates the process.
    - `disorder`: two successive outputs are emitted in reverse order.
    """
    probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The probability with which the fault occurs in each attempt of each request."""
    after_steps: CountOption = _NONE
    """The number of steps that a request completes before the fault. Requests with fewer steps are not affected."""
    attempts: Count = 1
    """The number of attempts of a request that the fault may affect, counted from the first. 0 means all
    attempts.
    """
    slow_s: AmountOption = _ONE
    """The time by which a `slow` fault extends a step, in seconds. Sampled for each step."""


@dataclass(frozen=True)
class FakeOptions:
    """The options of a fake stage: timing, sizes and faults.

    Each amount is a fixed number, or a distribution that is sampled with the request's seed.
    """

    steps: CountOption = _FOUR
    """The number of steps of a request in a `source` stage if the request does not set max_tokens.

    In other stages, the number of steps that load estimates assume.
    """
    step_s: AmountOption = _NONE
    """The duration of a step in seconds, sampled for each step. A duration of 0.02 yields 50 outputs per second."""
    first_step_s: AmountOption | None = None
    """The duration of the first step of a task, in seconds. None means `step_s`."""
    size_bytes: CountOption = _NONE
    """The size in bytes to which each text is repeated or cut, sampled for each step. The value 0 disables
    resizing.
    """
    fail_at_step: int | None = None
    """The number of the step that fails in every request, counted from 0. None disables this fault."""
    faults: tuple[Fault, ...] = ()
    """The faults that affect some of the requests, in addition to `fail_at_step`."""
    start_s: Annotated[float, Field(ge=0)] = 0.0
    """The time that the engine takes to start, in seconds."""
    wake_s: Annotated[float, Field(ge=0)] = 0.0
    """The time that the engine takes to wake from sleep, in seconds."""
    max_running: Annotated[int, Field(ge=1)] = 256
    """The maximum number of tasks that run at the same time. Further tasks wait."""
    checkpoint_steps: Count = 0
    """The number of steps between two checkpoints of a request. 0 disables checkpoints."""
    memory_bytes: Count = 0
    """The size of the memory that the engine allocates when it starts, in bytes."""
    request_memory_bytes: Count = 0
    """The size of the memory that each running task allocates, in bytes."""
    state_bytes: Annotated[int, Field(ge=32)] = 64 << 10
    """The size of the state that a `prefill` stage hands over, in bytes."""
    state_limit_s: Annotated[float, Field(gt=0)] = 30.0
    """The time limit of the tickets of a `prefill` stage, in seconds."""
    state_s: Annotated[float, Field(ge=0)] = 0.0
    """The time for which a `decode` stage reads a state, in seconds."""
    prefetch: Count = 0
    """The number of waiting requests whose state a `decode` stage reads before they run."""
    recompute: bool = False
    """Whether a `decode` stage computes the state itself if the ticket cannot be used. Otherwise, the step ends with an
    error, and the orchestrator restarts both stages.
    """
    frame_side: Annotated[int, Field(ge=2, multiple_of=2)] = 16
    """The width and the height of the frames of a `video` stage, in pixels. An even number."""


def fake_options(options: Mapping[str, JsonValue], *, stage: str = "") -> FakeOptions:
    """Parses the options of a fake stage. Raises InvalidRequestError, which names the invalid option."""
    return parse_options(FakeOptions, options, stage=stage)
