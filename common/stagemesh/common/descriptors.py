"""Descriptors: light descriptions of engines, functions and transforms, found through entry points.

A descriptor lists the tensors that go in and out and names the factory that does the heavy imports, so that a pipeline
can be checked without loading a model. The entry points of the groups `stagemesh.engines`, `stagemesh.functions` and
`stagemesh.transforms` name descriptors.
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
    """A tensor that a stage emits, and its meaning to a client.

    "text" is UTF-8 in uint8[bytes]. "tokens" is vocabulary positions in int32[tokens]. "audio" is float32[samples] at
    `sample_rate_hz`. "image" is an encoded image in uint8[bytes].
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
    """The tensors that a stage accepts and emits, and the options that a request may set.

    A stage that accepts no tensor receives the client's prompt.
    """

    accepts: Mapping[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    emits: Mapping[str, Emitted] = field(default_factory=dict[str, Emitted])
    options: Mapping[str, OptionSpec] = field(default_factory=dict[str, OptionSpec])
    adapters: bool = False
    """Whether a request may choose an adapter."""
    media: bool = False
    """Whether messages may contain more than text. The model decides which media it accepts."""
    negative_prompt: bool = False
    """Whether a request may have a negative prompt: a text of what the output must not show."""
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
    """An engine. `factory` is "module:callable": (StageConfig) -> Engine.

    `signature` returns a stage's signature for its function's name and its options, and raises an error if either is
    invalid.
    """

    factory: str
    signature: Callable[[str | None, Mapping[str, JsonValue]], Signature]
    needs_model: bool
    needs_function: bool = False
    stage_options: frozenset[str] | None = None
    """The names that a stage's `options` may have. None lets the factory check them."""
    joins: bool = True
    """Whether several edges may feed a stage in one request."""


_Descriptor = TypeVar("_Descriptor", EngineDescriptor, FunctionDescriptor, TransformDescriptor)


@cache
def _names(group: str) -> Mapping[str, Any]:
    return {entry.name: entry for entry in entry_points(group=group)}


def _load(group: str, name: str, kind: type[_Descriptor]) -> _Descriptor:
    known = _names(group)
    if name not in known:
        noun = group.removeprefix("stagemesh.").removesuffix("s")
        raise NotFoundError(
            f"unknown {noun} {name!r}; known: {', '.join(sorted(known)) or 'none'}",
            reason=f"UNKNOWN_{noun.upper()}",
        )
    descriptor = known[name].load()
    assert isinstance(descriptor, kind), f"entry point {name} of {group} is not a {kind.__name__}"
    return descriptor


def load_engine_descriptor(name: str) -> EngineDescriptor:
    """Returns the descriptor of an engine. Raises NotFoundError, which lists the known names."""
    return _load("stagemesh.engines", name, EngineDescriptor)


def load_function_descriptor(name: str) -> FunctionDescriptor:
    """Returns the descriptor of a function. Raises NotFoundError, which lists the known names."""
    return _load("stagemesh.functions", name, FunctionDescriptor)


def load_transform_descriptor(name: str) -> TransformDescriptor:
    """Returns the descriptor of a transform. Raises NotFoundError, which lists the known names."""
    return _load("stagemesh.transforms", name, TransformDescriptor)


def import_factory(path: str) -> Callable[..., Any]:
    """Imports and returns the callable that "module:attribute" names."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
