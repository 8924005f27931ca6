"""Descriptors of engines, functions and transforms, which are found through entry points.

A descriptor lists the input and output tensors and names a factory, which imports the heavy libraries. A pipeline can
therefore be checked without loading a model. Packages register descriptors as entry points in the groups
`stagemesh.engines`, `stagemesh.functions` and `stagemesh.transforms`.
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
    """A tensor that a stage emits, and how clients interpret it.

    The kind "text" is UTF-8 in uint8[bytes]. "tokens" is token ids in int32[tokens]. "audio" is float32[samples] at
    `sample_rate_hz`. "image" is an encoded image in uint8[bytes]. "tensor" has no further interpretation.
    """

    spec: TensorSpec
    kind: OutputKind = "tensor"
    sample_rate_hz: int = 0


@dataclass(frozen=True)
class OptionSpec:
    """The default and the inclusive bounds of a numeric option that a request may set for a stage."""

    default: float
    minimum: float
    maximum: float


@dataclass(frozen=True)
class Signature:
    """The tensors that a stage accepts and emits, and the options that a request may set for it.

    A stage that accepts no tensors receives the client's prompt.
    """

    accepts: Mapping[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    emits: Mapping[str, Emitted] = field(default_factory=dict[str, Emitted])
    options: Mapping[str, OptionSpec] = field(default_factory=dict[str, OptionSpec])
    adapters: bool = False
    """Whether a request may choose an adapter."""
    media: bool = False
    """Whether a request's messages may contain media. The model determines which media it accepts."""
    negative_prompt: bool = False
    """Whether a request may have a negative prompt: a description of content that the output must not show."""
    optional: frozenset[str] = frozenset()
    """The names of accepted tensors that a packet, or the whole request, may omit."""


@dataclass(frozen=True)
class FunctionDescriptor:
    """Describes a function stage.

    `factory` is a "module:callable" that is called with the model's path or None and with the stage's options, and
    returns the function.
    """

    signature: Signature
    factory: str


@dataclass(frozen=True)
class TransformDescriptor:
    """Describes a transform of an edge: its input tensors (`takes`) and its output tensors (`gives`).

    `factory` is a "module:callable" that is called without arguments once for each flow and returns the transform.
    """

    takes: Mapping[str, TensorSpec]
    gives: Mapping[str, TensorSpec]
    factory: str


@dataclass(frozen=True)
class EngineDescriptor:
    """Describes an engine.

    `factory` is a "module:callable" that is called with a StageConfig and returns the engine. `signature` is called
    with the stage's function name or None and with its options. It returns the stage's signature, and raises an error
    if the name or the options are invalid.
    """

    factory: str
    signature: Callable[[str | None, Mapping[str, JsonValue]], Signature]
    needs_model: bool
    needs_function: bool = False
    stage_options: frozenset[str] | None = None
    """The names that are allowed in a stage's `options`. If None, the factory checks the options."""
    joins: bool = True
    """Whether a stage may receive several edges in one request."""


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
    """Returns the named engine's descriptor.

    Raises NotFoundError if the name is unknown. The message lists the known names.
    """
    return _load("stagemesh.engines", name, EngineDescriptor)


def load_function_descriptor(name: str) -> FunctionDescriptor:
    """Returns the named function's descriptor.

    Raises NotFoundError if the name is unknown. The message lists the known names.
    """
    return _load("stagemesh.functions", name, FunctionDescriptor)


def load_transform_descriptor(name: str) -> TransformDescriptor:
    """Returns the named transform's descriptor.

    Raises NotFoundError if the name is unknown. The message lists the known names.
    """
    return _load("stagemesh.transforms", name, TransformDescriptor)


def import_factory(path: str) -> Callable[..., Any]:
    """Imports and returns the callable at `path`, which has the form "module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]
