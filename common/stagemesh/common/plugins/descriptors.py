"""Descriptors of engines, functions and transforms, and the protobuf messages of their signatures.

A descriptor states the input and output tensors, so that a pipeline can be checked without loading a model. Importing
a descriptor imports no heavy libraries. Only the descriptor's factory imports these libraries.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import JsonValue

from stagemesh.common.wire.encoding import to_message
from stagemesh.common.wire.tensors import TensorSpec, Value, fill_message, spec_to_wire
from stagemesh.v1 import signature_pb2

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


def signature_to_wire(
    signature: Signature, *, can_pause: bool = False, can_resume: bool = False
) -> signature_pb2.Signature:
    """Converts a signature to its protobuf message. The lists are sorted by name."""
    return to_message(
        signature_pb2.Signature,
        signature,
        accepts=[
            signature_pb2.AcceptedTensor(spec=spec_to_wire(name, spec), optional=name in signature.optional)
            for name, spec in sorted(signature.accepts.items())
        ],
        emits=[
            to_message(
                signature_pb2.EmittedTensor,
                emitted,
                spec=spec_to_wire(name, emitted.spec),
                kind=kind_to_wire(emitted.kind),
            )
            for name, emitted in sorted(signature.emits.items())
        ],
        options=[_option(name, spec) for name, spec in sorted(signature.options.items())],
        can_pause=can_pause,
        can_resume=can_resume,
    )


def kind_to_wire(kind: OutputKind) -> "signature_pb2.TensorKind.ValueType":
    """Converts the kind of a tensor to the value of its protobuf enum."""
    return signature_pb2.TensorKind.Value(f"TENSOR_KIND_{kind.upper()}")


def differing_fields(reported: signature_pb2.Signature, expected: Signature) -> list[str]:
    """Returns the names of the fields in which a reported signature differs from the expected one.

    The names of the tensors or options that differ follow the name of their field, for example "emits (audio, text)".
    Ignores `can_pause` and `can_resume`, which depend on the engine alone, the order of the lists, descriptions,
    further options of the replica, and fields that this process does not know.
    """
    theirs, ours = signature_pb2.Signature(), signature_to_wire(expected)
    theirs.CopyFrom(reported)
    theirs.DiscardUnknownFields()
    for option in (*theirs.options, *ours.options):
        option.ClearField("description")
    theirs.can_pause = theirs.can_resume = False
    theirs.accepts.sort(key=lambda each: each.spec.name)
    theirs.emits.sort(key=lambda each: each.spec.name)
    # A replica may have further options, which requests cannot set.
    known = [option for option in theirs.options if option.name in expected.options]
    theirs.ClearField("options")
    theirs.options.extend(sorted(known, key=lambda each: each.name))
    pairs = [(field.name, getattr(theirs, field.name), getattr(ours, field.name)) for field in ours.DESCRIPTOR.fields]
    return [
        name if isinstance(our, bool) else f"{name} ({_differing_names(their, our)})"
        for name, their, our in pairs
        if their != our
    ]


_Entry: TypeAlias = signature_pb2.AcceptedTensor | signature_pb2.EmittedTensor | signature_pb2.OptionSpec


def _differing_names(reported: Iterable[_Entry], expected: Iterable[_Entry]) -> str:
    theirs, ours = _by_name(reported), _by_name(expected)
    return ", ".join(sorted(name for name in {**theirs, **ours} if theirs.get(name) != ours.get(name)))


def _by_name(entries: Iterable[_Entry]) -> Mapping[str, _Entry]:
    return {each.name if isinstance(each, signature_pb2.OptionSpec) else each.spec.name: each for each in entries}


def _option(name: str, spec: OptionSpec) -> signature_pb2.OptionSpec:
    message = signature_pb2.OptionSpec(name=name, allowed_texts=spec.allowed_texts, description=spec.description)
    fill_message(message.default_value, spec.default)
    if math.isfinite(spec.minimum):
        message.minimum = spec.minimum
    if math.isfinite(spec.maximum):
        message.maximum = spec.maximum
    return message
