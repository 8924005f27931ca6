"""Signatures as messages, and their comparison."""

from dataclasses import replace

import pytest

from stagemesh.common.plugins.descriptors import Emitted, OptionSpec, Signature, differing_fields, signature_to_wire
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.v1 import signature_pb2

SIGNATURE = Signature(
    accepts={"codes": TensorSpec("int32", ("frames",)), "text": TensorSpec("uint8", ("bytes",))},
    emits={"audio": Emitted(TensorSpec("float32", ("samples",)), kind="audio", sample_rate_hz=24_000)},
    options={"voice": OptionSpec("alto", allowed_texts=("alto", "bass")), "speed": OptionSpec(1.0, 0.5, 2.0)},
    optional=frozenset({"text"}),
)


def test_a_message_has_everything_that_a_client_needs() -> None:
    message = signature_to_wire(SIGNATURE, can_pause=True)
    assert [(each.spec.name, each.optional) for each in message.accepts] == [("codes", False), ("text", True)]
    (audio,) = message.emits
    assert (audio.kind, audio.sample_rate_hz) == (signature_pb2.TENSOR_KIND_AUDIO, 24_000)
    speed, voice = message.options
    assert (speed.default_value.number, speed.minimum, speed.maximum) == (1.0, 0.5, 2.0)
    assert (voice.default_value.text, list(voice.allowed_texts)) == ("alto", ["alto", "bass"])
    assert not voice.HasField("maximum")
    assert (message.can_pause, message.can_resume) == (True, False)


def test_the_order_of_lists_and_abilities_of_the_engine_make_no_difference() -> None:
    message = signature_to_wire(SIGNATURE, can_pause=True, can_resume=True)
    for listed in (message.accepts, message.options):
        listed.sort(key=lambda each: each.SerializeToString(), reverse=True)
    assert differing_fields(message, SIGNATURE) == []


@pytest.mark.parametrize(
    ("field", "other"),
    [
        ("accepts (text)", replace(SIGNATURE, optional=frozenset())),
        ("emits (audio)", replace(SIGNATURE, emits={})),
        ("options (speed)", replace(SIGNATURE, options={"speed": OptionSpec(1, 0.5, 2.0)})),
        ("options (pitch)", replace(SIGNATURE, options={**SIGNATURE.options, "pitch": OptionSpec(1.0)})),
        ("adapters", replace(SIGNATURE, adapters=True)),
    ],
)
def test_another_signature_is_named_by_its_field(field: str, other: Signature) -> None:
    assert differing_fields(signature_to_wire(SIGNATURE), other) == [field]


def test_further_options_make_no_difference() -> None:
    assert differing_fields(signature_to_wire(SIGNATURE), replace(SIGNATURE, options={})) == []


def test_descriptions_and_unknown_fields_make_no_difference() -> None:
    message = signature_to_wire(SIGNATURE)
    message.options[0].description = "faster or slower"
    message.accepts[0].MergeFromString(b"\xc0\x3e\x01")
    assert differing_fields(message, SIGNATURE) == []
