"""The options of a fake stage."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, JsonValue

from stagemesh.services.engines.fake.distributions import Amount, AmountOption, CountOption
from stagemesh.services.engines.options import parse_options

Count: TypeAlias = Annotated[int, Field(ge=0)]
FaultKind: TypeAlias = Literal["error", "hang", "slow", "exit", "disorder"]

_NONE, _ONE, _FOUR = Amount(fixed=0), Amount(fixed=1), Amount(fixed=4)


@dataclass(frozen=True)
class Fault:
    """A fault that affects some requests, chosen by their seeds."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: FaultKind
    """The kind of the fault. `error`: the stage fails the request. `hang`: the task makes no further progress. `slow`:
    each further step takes `slow_s` longer. `exit`: SIGKILL terminates the process. `disorder`: two outputs are
    swapped."""
    probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The probability of the fault in each attempt of each request."""
    after_steps: CountOption = _NONE
    """The number of steps before the fault. Requests with fewer steps are not affected."""
    attempts: Count = 1
    """The number of attempts that the fault affects, counted from the first. 0 means all attempts."""
    slow_s: AmountOption = _ONE
    """The time added to a slow step, in seconds, sampled for each step."""


@dataclass(frozen=True)
class FakeOptions:
    """Options for the timing, sizes and faults of a fake stage.

    An amount is a number or a distribution that is sampled with the request's seed.
    """

    steps: CountOption = _FOUR
    """The number of steps of a source if the request does not set max_tokens. For other stages, the number of steps
    that load estimates assume."""
    step_s: AmountOption = _NONE
    """The duration of a step in seconds, sampled for each step. 0.02 yields 50 outputs per second."""
    first_step_s: AmountOption | None = None
    """The duration of the first step in seconds. None means `step_s`."""
    size_bytes: CountOption = _NONE
    """The size in bytes to which text is repeated or cut, sampled for each step. 0 leaves the text unchanged."""
    fail_at_step: int | None = None
    """The step, counted from 0, that fails in every request. None disables this fault."""
    faults: tuple[Fault, ...] = ()
    """The faults that affect some requests, in addition to `fail_at_step`."""
    start_s: Annotated[float, Field(ge=0)] = 0.0
    """The duration of loading the engine, in seconds."""
    max_running: Annotated[int, Field(ge=1)] = 256
    """The maximum number of tasks that run at the same time. Further tasks wait."""
    checkpoint_steps: Count = 0
    """The number of steps between two checkpoints. 0 disables checkpoints."""
    memory_bytes: Count = 0
    """The memory that the engine allocates when it starts, in bytes."""
    request_memory_bytes: Count = 0
    """The memory that each running task allocates, in bytes."""


def fake_options(options: Mapping[str, JsonValue], *, stage: str = "") -> FakeOptions:
    """Parses a stage's options. Raises InvalidRequestError, which names the invalid option."""
    return parse_options(FakeOptions, options, stage=stage)
