"""What a fake stage is like."""

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
    """What goes wrong with some requests; their seeds say with which."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: FaultKind
    """error: the stage fails the request. hang: it goes on no more, and says nothing. slow: each further step takes
    `slow_s` longer. exit: the process is gone at once, as by kill -9. disorder: two outputs come in each other's
    place."""
    probability: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Of the requests, and of each attempt anew."""
    after_steps: CountOption = _NONE
    """Steps that are done first; a request that has fewer is spared."""
    attempts: Count = 1
    """It strikes attempts up to this number; 0 for all, so that no attempt succeeds."""
    slow_s: AmountOption = _ONE
    """Seconds, drawn for each step."""


@dataclass(frozen=True)
class FakeOptions:
    """How a fake stage behaves. Amounts are numbers or distributions (`Amount`), drawn by the request's seed."""

    steps: CountOption = _FOUR
    """Steps of a source where the request sets no max_tokens; of other stages, how many they expect."""
    step_s: AmountOption = _NONE
    """How long a step takes, drawn for each; 0.02 makes 50 outputs a second."""
    first_step_s: AmountOption | None = None
    """How long the first step takes, where that is another time."""
    size_bytes: CountOption = _NONE
    """Text is padded or cut to this size, drawn for each step; 0 leaves it as it is."""
    fail_at_step: int | None = None
    """The step, from 0, that raises, whatever the request."""
    faults: tuple[Fault, ...] = ()
    """What else goes wrong."""
    start_s: Annotated[float, Field(ge=0)] = 0.0
    """How long loading takes."""
    max_running: Annotated[int, Field(ge=1)] = 256
    """Tasks run at once; more are queued."""
    checkpoint_steps: Count = 0
    """Steps between two checkpoints; 0 for none."""
    memory_bytes: Count = 0
    """Memory that is held from the start."""
    request_memory_bytes: Count = 0
    """Memory that each running task holds."""


def fake_options(options: Mapping[str, JsonValue], *, stage: str = "") -> FakeOptions:
    """A stage's options; raises InvalidRequestError naming the one at fault."""
    return parse_options(FakeOptions, options, stage=stage)
