"""Stages with `engine: external`: what a pipeline file declares for them, and every mistake in it."""

from pathlib import Path

from stagemesh.common.plugins.descriptors import Emitted, OptionSpec, Signature
from stagemesh.common.wire.tensors import TensorSpec
from tests.pipeline.files import errors, load, mistakes

GOOD = """\
pipeline: song
stages:
  thinker: {engine: plain, function: talk}
  reader:
    engine: external
    addresses: ["10.0.0.9:50051", "[::1]:50052"]
    signature:
      accepts:
        text: uint8[bytes]
        image: {type: "float32[h, w, 3]", optional: true}
      emits:
        frames: float32[frames, 8]
        sound: {type: "float32[samples]", kind: audio, sample_rate_hz: 24000}
      options:
        voice: {default: anna, allowed_texts: [anna, ben], description: The speaker.}
        gain: {default: 1.0, minimum: 0.5, maximum: 2}
        fast: {default: false}
      sampling: false
      adapters: true
  singer: {engine: plain, function: sing}
edges:
  - {from: thinker, to: reader}
  - {from: reader, to: singer}
outputs: {text: thinker, audio: singer}
"""


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


EXTERNAL_SINGER = """\
singer:
    engine: external
    signature:
      accepts: {frames: "float32[frames, 16]"}
      emits: {audio: {type: "float32[samples]", kind: audio, sample_rate_hz: 1000}}
edges:
  - {from: reader, to: singer, transform: frames.wider}
"""


@mistakes(GOOD, {
    "no signature": ("    signature:\n", "    signatur:\n", "4: stages.reader has no 'signature'; add it"),
    "stage that is not a mapping": ("{engine: plain, function: sing}", "external",
        "20: stages.singer is 'external'; input should be a valid dictionary or instance of StageEntry"),
    "misspelt key": ("      sampling: false", "      sampled: false",
        "18: unknown key 'stages.reader.signature.sampled'; did you mean 'sampling'?"),
    "misspelt key of an option": ("default: false", "default: false, allowed_text: []",
        "17: unknown key 'stages.reader.signature.options.fast.allowed_text'; did you mean 'allowed_texts'?"),
    "key of a stage that is started": ("    addresses:", "    data_plane: {arena_bytes: 1048576}\n    addresses:",
        ("6: stages.reader.data_plane has no effect, because Stagemesh does not start the replicas of an external "
         "stage; remove it")),
    "signature of a stage that is started": ("function: sing", "function: sing, signature: {}",
        "20: stages.singer.signature is only for stages with `engine: external`; remove it"),
    "bad address": ("10.0.0.9:50051", "10.0.0.9",
        "6: stages.reader.addresses.0 is '10.0.0.9'; write an address as host:port"),
    "bad type": ("uint8[bytes]", "uint8(bytes)",
        ("9: stages.reader.signature.accepts.text.type is 'uint8(bytes)'; 'uint8(bytes)' is not a tensor type; "
         "write one like float32[frames, 601]; dtypes: bool, uint8, int8, int16, int32, int64, float16, bfloat16, "
         "float32, float64")),
    "unknown kind": ("kind: audio", "kind: sound",
        ("13: stages.reader.signature.emits.sound.kind is 'sound'; input should be 'text', 'tokens', 'audio', "
         "'image', 'tensor' or 'media'")),
    "kind of another type": ("float32[samples]", "int32[samples]",
        ("13: stages.reader.signature.emits.sound is {'type': 'int32[samples]', 'kind': 'audio', 'sample_rate_hz': "
         "24000}; a tensor of kind audio is float32 with 1 dimension or float32 with 2 dimensions, not "
         "int32[samples]")),
    "audio without a rate": (", sample_rate_hz: 24000", "",
        ("13: stages.reader.signature.emits.sound is {'type': 'float32[samples]', 'kind': 'audio'}; audio needs "
         "sample_rate_hz, and other kinds have none")),
    "media without a type": ("kind: audio, sample_rate_hz: 24000", "kind: media",
        ("13: stages.reader.signature.emits.sound is {'type': 'float32[samples]', 'kind': 'media'}; a tensor of "
         "kind media is uint8 with 1 dimension, not float32[samples]")),
    "nothing emitted": ("      emits:\n", "      emits: {}\n      options: {}\n      accepts:\n",
        "11: stages.reader.signature.emits is empty; add at least one item"),
    "default that is not allowed": ("default: anna", "default: eve",
        ("15: stages.reader.signature.options.voice is {'default': 'eve', 'allowed_texts': ['anna', 'ben'], "
         "'description': 'The speaker.'}; the default must be one of 'anna', 'ben'")),
    "default out of bounds": ("default: 1.0", "default: 3.0",
        ("16: stages.reader.signature.options.gain is {'default': 3.0, 'minimum': 0.5, 'maximum': 2}; the default "
         "must be a number from 0.5 to 2")),
    "texts of a number": ("minimum: 0.5", "allowed_texts: [a]",
        ("16: stages.reader.signature.options.gain is {'default': 1.0, 'allowed_texts': ['a'], 'maximum': 2}; only "
         "a text has allowed_texts")),
    "bounds of a flag": ("default: false", "default: false, maximum: 1",
        "17: stages.reader.signature.options.fast is {'default': False, 'maximum': 1}; a flag has no maximum"),
    "minimum of a text": ("default: anna", "minimum: 1, default: anna",
        ("15: stages.reader.signature.options.voice is {'minimum': 1, 'default': 'anna', 'allowed_texts': ['anna', "
         "'ben'], 'description': 'The speaker.'}; only a number has a minimum")),
    "type mismatch along an edge": ("frames: float32[frames, 8]", "frames: float32[frames, 9]",
        ("23: type mismatch: stage 'reader' gives frames: float32[frames, 9], stage 'singer' expects frames: "
         "float32[frames, 8]; add or change the edge's transform")),
    "transform between two external stages": (
        "singer: {engine: plain, function: sing}\nedges:\n", EXTERNAL_SINGER,
        ("26: stages 'reader' and 'singer' are external, so that none of them can run transform 'frames.wider'; put "
         "a function stage between them")),
    "frames of a transform at the producer": ("to: reader}", "to: reader, transform: text.split, chunk: {frames: 4}}",
        ("22: the tensors that transform 'text.split' emits have no common first axis to cut frames from (text: "
         "uint8[bytes], words: int32[words]); use `step` or `whole`")),
    "required input that no edge brings": (", optional: true", "",
        "4: no edge brings stage 'reader' its image: float32[h, w, 3]; add one, or change a transform"),
})  # fmt: skip
def test_a_mistake_is_reported_with_its_line_and_remedy(tmp_path: Path, text: str, error: str) -> None:
    assert error in errors(tmp_path, text)
