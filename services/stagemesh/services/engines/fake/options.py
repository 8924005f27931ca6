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
    """A fault that strikes some requests, chosen by their seeds."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: FaultKind
    """error: the stage fails the request. hang: the task makes no more progress. slow: each further step takes `slow_s`
    longer. exit: the process is killed by SIGKILL. disorder: two outputs are swapped."""
    probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The probability for each attempt of each request."""
    after_steps: CountOption = _NONE
    """The number of steps before the fault. A request with fewer steps is not struck."""
    attempts: Count = 1
    """The fault strikes attempts up to this number; 0 for all attempts."""
    slow_s: AmountOption = _ONE
    """The added seconds of a slow step, drawn for each step."""


@dataclass(frozen=True)
class FakeOptions:
    """The behaviour of a fake stage. An `Amount` is a number or a distribution, sampled by the request's seed."""

    steps: CountOption = _FOUR
    """The steps of a source if the request sets no max_tokens; for other stages, the expected number of steps."""
    step_s: AmountOption = _NONE
    """The seconds of a step, drawn for each step. 0.02 yields 50 outputs per second."""
    first_step_s: AmountOption | None = None
    """The seconds of the first step; None for `step_s`."""
    size_bytes: CountOption = _NONE
    """The size to which text is padded or cut, drawn for each step; 0 leaves it unchanged."""
    fail_at_step: int | None = None
    """The step, from 0, that raises for every request."""
    faults: tuple[Fault, ...] = ()
    """The other faults."""
    start_s: Annotated[float, Field(ge=0)] = 0.0
    """The seconds of loading."""
    max_running: Annotated[int, Field(ge=1)] = 256
    """The number of tasks that run at once; more tasks are queued."""
    checkpoint_steps: Count = 0
    """The number of steps between two checkpoints; 0 for no checkpoints."""
    memory_bytes: Count = 0
    """The bytes of memory that the engine allocates at its start."""
    request_memory_bytes: Count = 0
    """The bytes of memory that each running task allocates."""


def fake_options(options: Mapping[str, JsonValue], *, stage: str = "") -> FakeOptions:
    """Returns a stage's options; raises InvalidRequestError with the option at fault."""
    return parse_options(FakeOptions, options, stage=stage)
