"""Descriptors of engines, functions and transforms, which are found through entry points.

A descriptor states the input and output tensors, so that a pipeline can be checked without loading a model. Importing a
descriptor imports no heavy libraries. Only the descriptor's factory imports these libraries. Packages register
descriptors as entry points in the groups `stagemesh.engines`, `stagemesh.functions`, `stagemesh.transforms` and
`stagemesh.codec_models`.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from math import inf
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import JsonValue

from stagemesh.common.errors import NotFoundError, NotReadyError
from stagemesh.common.tensors import TensorSpec
from stagemesh.common.typed_values import Value

EXTERNAL = "external"
"""The value of `engine` for a stage whose replicas are not started by Stagemesh. No descriptor has this name."""

INPUT = "@input"
"""The producer of an edge that carries the input which a client streams into a running request. No stage has this name.
"""

OutputKind = Literal["text", "tokens", "audio", "image", "tensor", "media"]

TEXT = "text"
"""The name of the tensor with the text of the client's prompt."""
_TEXT_SPEC = TensorSpec.parse("uint8[bytes]")


@dataclass(frozen=True)
class Emitted:
    """The type of a tensor that a stage emits, and the clients' interpretation of the tensor.

    `kind` determines the interpretation:

    - "text": UTF-8 bytes as uint8[bytes]
    - "tokens": token ids as int32[tokens]
    - "audio": float32[samples] at `sample_rate_hz`
    - "image": an encoded image as uint8[bytes]
    - "tensor": no further interpretation
    - "media": a part of one encoded file of the type `media_type`, as uint8[bytes]
    """

    spec: TensorSpec
    kind: OutputKind = "tensor"
    sample_rate_hz: int = 0
    media_type: str = ""


@dataclass(frozen=True)
class OptionSpec:
    """The type, the default and the allowed values of an option that a request may set for a stage.

    The type of `default` is the option's type: float, int, bool or str.
    """

    default: Value
    minimum: float = -inf
    maximum: float = inf
    """The inclusive bounds of a number. A text has at most `maximum` characters."""
    allowed_texts: tuple[str, ...] = ()
    """The allowed texts. Empty if any text is allowed."""
    description: str = ""
    """A description of the option for people."""


@dataclass(frozen=True)
class Signature:
    """The tensors that a stage accepts and emits, and the options that a request may set for the stage.

    A stage that accepts no tensors, except tickets, receives the client's prompt. So does a function that needs only
    text, in a request in which no edge leads to it.
    """

    accepts: Mapping[str, TensorSpec] = field(default_factory=dict[str, TensorSpec])
    emits: Mapping[str, Emitted] = field(default_factory=dict[str, Emitted])
    options: Mapping[str, OptionSpec] = field(default_factory=dict[str, OptionSpec])
    sampling: bool = False
    """Whether the stage chooses tokens, so that a request may set sampling parameters for the stage."""
    adapters: bool = False
    """Whether a request may select an adapter for the stage."""
    media: bool = False
    """Whether a request's messages may contain images, audio or video. The model determines the allowed kinds."""
    negative_prompt: bool = False
    """Whether a request may have a negative prompt, which describes content that the output must not show."""
    optional: frozenset[str] = frozenset()
    """The names of accepted tensors that are optional. A packet or a whole request may omit them."""
    assists: bool = False
    """Whether the stage computes a part of its consumer's work, such as a prefill stage.

    The adapter of a request for the consumer is then also the stage's adapter. Not part of the signature on the wire.
    """

    @property
    def takes_prompt(self) -> bool:
        """Whether the stage receives the client's prompt."""
        return all(spec.ticket_kind for spec in self.accepts.values())

    @property
    def needs_text_alone(self) -> bool:
        """Whether the stage needs no tensor but `text`, which the client's prompt can replace."""
        text = self.accepts.get(TEXT)
        return text is not None and text.accepts(_TEXT_SPEC) and self.accepts.keys() - self.optional == {TEXT}

    @property
    def accepted_kinds(self) -> frozenset[str]:
        """The kinds of the tickets that the stage accepts."""
        return frozenset(spec.ticket_kind for spec in self.accepts.values()) - {""}

    @property
    def emitted_kinds(self) -> frozenset[str]:
        """The kinds of the tickets that the stage emits."""
        return frozenset(emitted.spec.ticket_kind for emitted in self.emits.values()) - {""}


@dataclass(frozen=True)
class FunctionDescriptor:
    """A description of a function that a stage can run.

    `factory` is the "module:callable" that returns the function. The callable's arguments are the path of the stage's
    model, or None if the stage has no model, and the stage's options.
    """

    signature: Signature
    factory: str
    stage_options: Mapping[str, OptionSpec] | None = None
    """The options of a stage that the callable reads. None if the callable itself checks its options."""


@dataclass(frozen=True)
class TransformDescriptor:
    """A description of a transform that an edge applies to its tensors.

    `takes` contains the types of the input tensors, and `gives` the types of the output tensors, by tensor name.
    `factory` is the "module:callable" that returns the transform. The callable is called once for each flow. Its
    argument is the path of the model of the stage that applies the transform, or None if this stage has no model.
    """

    takes: Mapping[str, TensorSpec]
    gives: Mapping[str, TensorSpec]
    factory: str


@dataclass(frozen=True)
class CodecModelDescriptor:
    """A description of a codec language model, which the vllm engine runs for the stage option `codec`.

    A codec language model samples frames of the codes of an audio codec. `accepts` contains the types of its input
    rows, or nothing if it speaks the client's prompt. `factory` is the "module:callable" that returns the model's
    `CodecModel`; its argument is the path of the model's folder. `architecture` is the name of the model's class for
    vLLM, and `model_class` the "module:class".
    """

    accepts: Mapping[str, TensorSpec]
    options: Mapping[str, OptionSpec]
    factory: str
    architecture: str
    model_class: str


@dataclass(frozen=True)
class EngineDescriptor:
    """A description of an engine. Loading the description does not import the engine's libraries.

    `factory` is the "module:callable" that creates the engine from a StageConfig. `signature` returns the signature of
    a stage. The arguments of `signature` are the name of the stage's function, or None if the stage has no function,
    and the stage's options. `signature` raises an error if the function's name or an option is invalid.
    """

    factory: str
    signature: Callable[[str | None, Mapping[str, JsonValue]], Signature]
    needs_model: bool
    needs_function: bool = False
    stage_options: frozenset[str] | None = None
    """The names of the allowed `options` of a stage, or None if the factory checks the options."""
    joins: bool = True
    """Whether a stage may receive tensors from several edges in one request."""
    model_problem: Callable[[Path, Mapping[str, JsonValue]], str] | None = None
    """Returns why a stage with these options cannot run the model in a folder, or "" if the engine knows its class.

    None if the engine does not check the class.
    """
    preload: str | None = None
    """The "module:function" that imports the engine's libraries into a process that forks stages (`fork_server`).

    The function returns another one, which each forked process calls before it starts a thread. None if processes of
    stages must not be forked.
    """


_Descriptor = TypeVar("_Descriptor", EngineDescriptor, FunctionDescriptor, TransformDescriptor, CodecModelDescriptor)


_UNKNOWN_REASONS = {
    "stagemesh.engines": "UNKNOWN_ENGINE",
    "stagemesh.functions": "UNKNOWN_FUNCTION",
    "stagemesh.transforms": "UNKNOWN_TRANSFORM",
    "stagemesh.codec_models": "UNKNOWN_FUNCTION",
}


@cache
def _names(group: str, _path: tuple[str, ...]) -> Mapping[str, Sequence[EntryPoint]]:
    """Returns the different entry points of the packages on `sys.path`, by name. Each name should have only one."""
    found: dict[str, list[EntryPoint]] = {}
    for entry in entry_points(group=group):
        same_name = found.setdefault(entry.name, [])
        # A package may be found twice, for example if it is also on PYTHONPATH.
        if entry.value not in [each.value for each in same_name]:
            same_name.append(entry)
    return found


def _load(group: str, name: str, kind: type[_Descriptor]) -> _Descriptor:
    known = _names(group, tuple(sys.path))
    noun = group.removeprefix("stagemesh.").removesuffix("s").replace("_", " ")
    if name not in known:
        raise NotFoundError(
            f"unknown {noun} {name!r}; known: {', '.join(sorted(known)) or 'none'}",
            reason=_UNKNOWN_REASONS[group],
        )
    entry, *others = known[name]
    if others:
        packages = " and ".join(map(_package_of, known[name]))
        raise _broken(f"{noun} {name!r} is registered more than once, by {packages}; remove one of them")
    where = f"{noun} {name!r} of {_package_of(entry)}"
    try:
        descriptor = entry.load()
    except Exception as exc:
        text = f"{where}: entry point {entry.value!r} cannot be loaded: {type(exc).__name__}: {exc}"
        raise _broken(
            f"{text}; install the package again if its entry points have changed, correct it, or remove it"
        ) from exc
    if not isinstance(descriptor, kind):
        raise _broken(f"{where}: {entry.value} is {type(descriptor).__name__}; it must be a {kind.__name__}")
    return descriptor


def _package_of(entry: EntryPoint) -> str:
    return f"package {entry.dist.name} {entry.dist.version}" if entry.dist is not None else "an unknown package"


def _broken(message: str) -> NotReadyError:
    return NotReadyError(message, reason="INVALID_DESCRIPTOR")


def load_engine_descriptor(name: str) -> EngineDescriptor:
    """Returns the descriptor of the engine `name`.

    Raises NotFoundError, which lists all engine names, if the name is unknown. Raises NotReadyError
    (INVALID_DESCRIPTOR) if its package is broken, or if several packages register the name.
    """
    return _load("stagemesh.engines", name, EngineDescriptor)


def load_function_descriptor(name: str) -> FunctionDescriptor:
    """Returns the descriptor of the function `name`.

    Raises NotFoundError, which lists all function names, if the name is unknown. Raises NotReadyError
    (INVALID_DESCRIPTOR) if its package is broken, or if several packages register the name.
    """
    return _load("stagemesh.functions", name, FunctionDescriptor)


def load_transform_descriptor(name: str) -> TransformDescriptor:
    """Returns the descriptor of the transform `name`.

    Raises NotFoundError, which lists all transform names, if the name is unknown. Raises NotReadyError
    (INVALID_DESCRIPTOR) if its package is broken, or if several packages register the name.
    """
    return _load("stagemesh.transforms", name, TransformDescriptor)


def load_codec_model_descriptor(name: str) -> CodecModelDescriptor:
    """Returns the descriptor of the codec language model `name`.

    Raises the errors of `load_engine_descriptor`.
    """
    return _load("stagemesh.codec_models", name, CodecModelDescriptor)


def codec_model_descriptors() -> Sequence[CodecModelDescriptor]:
    """Returns the descriptors of all codec language models."""
    return [load_codec_model_descriptor(name) for name in _names("stagemesh.codec_models", tuple(sys.path))]


def import_factory(path: str) -> Callable[..., Any]:
    """Imports and returns the callable at `path`, which has the form "module:attribute"."""
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)  # type: ignore[no-any-return]


def factory_problem(path: str, *, methods: Sequence[str]) -> str:
    """Imports the factory at `path`. Returns what is wrong with it, or "" if nothing is.

    A factory that is a class must have `methods`.
    """
    try:
        factory = import_factory(path)
    except Exception as exc:  # noqa: BLE001  # the module may raise anything
        return f"its factory {path!r} cannot be imported: {type(exc).__name__}: {exc}"
    if not callable(factory):
        return f"its factory {path!r} is {type(factory).__name__}, which cannot be called"
    # Not `hasattr`, because each class can be called.
    defined = {name for base in factory.__mro__ for name in vars(base)} if isinstance(factory, type) else set(methods)
    missing = [name for name in methods if name not in defined]
    return f"its factory {path!r} lacks the methods {', '.join(missing)}" if missing else ""
