"""Converts signatures to their protobuf messages, and compares them."""

import math
from collections.abc import Iterable, Mapping
from typing import TypeAlias

from stagemesh.common import descriptors
from stagemesh.common.tensors import spec_to_wire
from stagemesh.common.typed_values import fill_message
from stagemesh.v1 import signature_pb2


def signature_to_wire(
    signature: descriptors.Signature, *, can_pause: bool = False, can_resume: bool = False
) -> signature_pb2.Signature:
    """Converts a signature to its protobuf message. The lists are sorted by name."""
    return signature_pb2.Signature(
        accepts=[
            signature_pb2.AcceptedTensor(spec=spec_to_wire(name, spec), optional=name in signature.optional)
            for name, spec in sorted(signature.accepts.items())
        ],
        emits=[
            signature_pb2.EmittedTensor(
                spec=spec_to_wire(name, emitted.spec),
                kind=kind_to_wire(emitted.kind),
                sample_rate_hz=emitted.sample_rate_hz,
                media_type=emitted.media_type,
            )
            for name, emitted in sorted(signature.emits.items())
        ],
        options=[_option(name, spec) for name, spec in sorted(signature.options.items())],
        sampling=signature.sampling,
        adapters=signature.adapters,
        media=signature.media,
        negative_prompt=signature.negative_prompt,
        can_pause=can_pause,
        can_resume=can_resume,
    )


def kind_to_wire(kind: descriptors.OutputKind) -> "signature_pb2.TensorKind.ValueType":
    """Converts the kind of a tensor to the value of its protobuf enum."""
    return signature_pb2.TensorKind.Value(f"TENSOR_KIND_{kind.upper()}")


def differing_fields(reported: signature_pb2.Signature, expected: descriptors.Signature) -> list[str]:
    """Returns the names of the fields in which a reported signature differs from the expected one.

    The names of the tensors or options that differ follow the name of their field, for example "emits (audio, text)".
    Ignores `can_pause` and `can_resume`, which depend on the engine alone, the order of the lists, descriptions, and
    fields that this process does not know.
    """
    theirs, ours = signature_pb2.Signature(), signature_to_wire(expected)
    theirs.CopyFrom(reported)
    theirs.DiscardUnknownFields()
    for option in (*theirs.options, *ours.options):
        option.ClearField("description")
    theirs.can_pause = theirs.can_resume = False
    theirs.accepts.sort(key=lambda each: each.spec.name)
    theirs.emits.sort(key=lambda each: each.spec.name)
    theirs.options.sort(key=lambda each: each.name)
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


def _option(name: str, spec: descriptors.OptionSpec) -> signature_pb2.OptionSpec:
    message = signature_pb2.OptionSpec(name=name, allowed_texts=spec.allowed_texts, description=spec.description)
    fill_message(message.default_value, spec.default)
    if math.isfinite(spec.minimum):
        message.minimum = spec.minimum
    if math.isfinite(spec.maximum):
        message.maximum = spec.maximum
    return message
