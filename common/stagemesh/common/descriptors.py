"""Cards: light descriptions of engines, functions and transforms, found through entry points.

A card names the factory that does the heavy importing, and says up front which tensors go in and out, so
that a pipeline can be checked where no model can be loaded. Groups: `stagemesh.engines`,
`stagemesh.functions`, `stagemesh.transforms`; each entry point names a card.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Literal, TypeVar

from pydantic import JsonValue

from stagemesh.common.errors import NotFoundError
from stagemesh.common.tensors import TensorSpec

OutputKind = Literal["text", "tokens", "audio", "image", "tensor"]


@dataclass(frozen=True)
class Emitted:
    """A tensor that a stage emits, and what it is to a client.

    "text" is UTF-8 in uint8[bytes]; "tokens" is vocabulary positions in int32[tokens]; "audio" is float32[samples] at
    `sample_rate_hz`; "image" is an encoded picture in uint8[bytes].
    """

    spec: TensorSpec
    kind: OutputKind = "tensor"
    sample_rate_hz: int = 0


@dataclass(frozen=True)
class OptionSpec:
    """A number that a request may set for a stage, with its default and inclusive bounds."""

    default: float
    minimum: float
    maximum: float


@dataclass(frozen=True)
class Signature:
    """What a stage is fed by its edges (empty: it takes the client's prompt), emits, and lets a request set."""

    accepts: Mapping[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    emits: Mapping[str, Emitted] = field(default_factory=dict[str, Emitted])
    options: Mapping[str, OptionSpec] = field(default_factory=dict[str, OptionSpec])
    adapters: bool = False
    """Whether a request may choose an adapter."""
    media: bool = False
    """Whether messages may hold more than text; the model then decides."""
    negative_prompt: bool = False
    """Whether a request may say what the output is not to show."""
    optional: frozenset[str] = frozenset()
    """Accepted tensors that a packet, or a whole request, may lack."""


@dataclass(frozen=True)
class FunctionDescriptor:
    """A function stage. `factory` is "module:callable": (model: Path | None, options: Mapping) -> Function."""

    signature: Signature
    factory: str


@dataclass(frozen=True)
class TransformDescriptor:
    """An edge's transform. `factory` is "module:callable", called without arguments once a flow -> Transform."""

    takes: Mapping[str, TensorSpec]
    gives: Mapping[str, TensorSpec]
    factory: str


@dataclass(frozen=True)
class EngineDescriptor:
    """An engine. `signature` gives a stage's tensors from its function's name and its options, and raises what is wrong
    with them; `factory` is (StageConfig) -> Engine.
    """

    factory: str
    signature: Callable[[str | None, Mapping[str, JsonValue]], Signature]
    needs_model: bool
    needs_function: bool = False
    stage_options: frozenset[str] | None = None
    """The names that a stage's `options` may hold; None leaves them to the factory."""
    joins: bool = True
    """Whether several edges may feed a stage in one request."""


_Card = TypeVar("_Card", EngineDescriptor, FunctionDescriptor, TransformDescriptor)


@cache
def _names(group: str) -> Mapping[str, Any]:
    return {entry.name: entry for entry in entry_points(group=group)}


def _load(group: str, name: str, kind: type[_Card]) -> _Card:
    known = _names(group)
    if name not in known:
        what = group.removeprefix("stagemesh.").removesuffix("s")
        raise NotFoundError(
            f"unknown {what} {name!r}; known: {', '.join(sorted(known)) or 'none'}",
            reason=f"UNKNOWN_{what.upper()}",
        )
    card = known[name].load()
    assert isinstance(card, kind), f"entry point {name} of {group} is no {kind.__name__}"
    return card


def load_engine_descriptor(name: str) -> EngineDescriptor:
    """The card of an engine; raises NotFoundError naming those known."""
    return _load("stagemesh.engines", name, EngineDescriptor)


def load_function_descriptor(name: str) -> FunctionDescriptor:
    """The card of a function; raises NotFoundError naming those known."""
    return _load("stagemesh.functions", name, FunctionDescriptor)


def load_transform_descriptor(name: str) -> TransformDescriptor:
    """The card of a transform; raises NotFoundError naming those known."""
    return _load("stagemesh.transforms", name, TransformDescriptor)


def import_factory(path: str) -> Callable[..., Any]:
    """The callable that "module:attribute" names."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
