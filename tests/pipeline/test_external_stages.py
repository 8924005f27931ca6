"""Stages with `engine: external`: what a pipeline file declares for them, and every mistake in it."""

from pathlib import Path

from stagemesh.common.plugins.descriptors import Emitted, OptionSpec, Signature
from stagemesh.common.wire.tensors import TensorSpec
from tests.pipeline.files import good, load

GOOD = good("external")


def test_a_file_declares_the_whole_signature(tmp_path: Path) -> None:
    stage = load(tmp_path, GOOD).stages["reader"]
    assert (stage.is_external, stage.addresses) == (True, ("10.0.0.9:50051", "[::1]:50052"))
    assert stage.signature == Signature(
        accepts={"text": TensorSpec.parse("uint8[bytes]"), "image": TensorSpec.parse("float32[h, w, 3]")},
        emits={
            "frames": Emitted(TensorSpec.parse("float32[frames, 8]")),
            "sound": Emitted(TensorSpec.parse("float32[samples]"), kind="audio", sample_rate_hz=24_000),
        },
        options={
            "voice": OptionSpec("anna", allowed_texts=("anna", "ben"), description="The speaker."),
            "gain": OptionSpec(1.0, 0.5, 2.0),
            "fast": OptionSpec(False),
        },
        adapters=True,
        optional=frozenset({"image"}),
    )


def test_the_signature_but_not_the_addresses_are_part_of_the_generation(tmp_path: Path) -> None:
    generation = load(tmp_path, GOOD).generation
    assert load(tmp_path, GOOD.replace("10.0.0.9", "10.0.0.8")).generation == generation
    assert load(tmp_path, GOOD.replace("adapters: true", "adapters: false")).generation != generation


def test_values_are_explained_with_their_lines(tmp_path: Path) -> None:
    explained = {row.key: row for row in load(tmp_path, GOOD).explanation if row.key.startswith("stages.reader")}
    accepted = explained["stages.reader.signature.accepts.text"]
    assert (accepted.value, accepted.origin) == ("uint8[bytes]", f"{tmp_path}/pipeline.yaml:9")
    assert explained["stages.reader.signature.options.gain.maximum"].value == "2.0"
    assert explained["stages.reader.signature.media"].origin == "default"
    assert "stages.reader.replicas" not in explained


def test_the_transform_of_an_edge_runs_where_stagemesh_runs(tmp_path: Path) -> None:
    edges = load(tmp_path, GOOD.replace("to: reader}", "to: reader, transform: text.upper}")).edges
    assert [edge.transforms_at_producer for edge in edges] == [True, False]
    wide = GOOD.replace("sing}", "wide}").replace("to: singer}", "to: singer, transform: frames.wider}")
    edges = load(tmp_path, wide.replace("audio: singer", "voice: singer")).edges
    assert not any(edge.transforms_at_producer for edge in edges)
