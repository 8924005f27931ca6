"""Pipeline files: how they are read, and every mistake that they can contain, with the exact line and text."""

import re
from pathlib import Path

import pytest

from stagemesh.common.errors import InvalidPipelineError, NotFoundError
from stagemesh.common.plugins.connectors import AUTO, GRPC, SHM
from stagemesh.common.wire.chunk_sizes import FramesPolicy, StepPolicy, WholePolicy
from stagemesh.pipeline import Bounds, Limits, built_in_pipelines, load_pipeline
from tests.pipeline.files import edited, errors, load, mistakes
from tests.rpc.call_errors import raises

GOOD = """\
pipeline: song
stages:
  thinker: {engine: plain, function: talk}
  reader: {engine: plain, function: read}
  singer: {engine: plain, function: sing}
edges:
  - {from: thinker, to: reader}
  - {from: reader, to: singer}
outputs: {text: thinker, audio: singer}
"""


@mistakes(GOOD, {
    "unknown key": ("engine: plain, function: talk", "engine: plain, function: talk, modle: x",
        "3: unknown key 'stages.thinker.modle'; did you mean 'model'?"),
    "unknown key at the top": ("outputs:", "output: {}\noutputs:", "9: unknown key 'output'; did you mean 'outputs'?"),
    "key given twice": ("edges:", "  thinker: {engine: plain, function: talk}\nedges:",
        "6: stages.thinker is given twice (first on line 3); keep one"),
    "missing key": ("{from: thinker, to: reader}", "{from: thinker}", "7: edges.0 has no 'to'; add it"),
    "bad number of replicas": ("function: read", "function: read, replicas: 0",
        "4: stages.reader.replicas is 0; input should be greater than or equal to 1"),
    "bad stage name": ("  singer: ", "  Singer: {engine: plain, function: sing}\n  singer: ",
        "5: 'stages.Singer' is not a valid name; use lower-case letters, digits and '-', a letter first"),
    "bad pipeline name": ("pipeline: song", "pipeline: My Song",
        "1: pipeline is 'My Song'; use lower-case letters, digits and '-', a letter first"),
    "unknown engine": ("engine: plain, function: read", "engine: plane, function: read",
        "4: unknown engine 'plane'; known: heavy, lone, plain"),
    "unknown function": ("function: read", "function: reed",
        "4: unknown function 'reed'; known: blend, drawl, film, hear, lipread, listen, mix, read, sing, talk, wide"),
    "function left out": ("{engine: plain, function: read}", "{engine: plain}",
        "4: engine 'plain' runs a function; add `function: NAME`"),
    "unknown stage option": ("function: read", "function: read, options: {maxlen: 3}",
        "4: engine 'plain' has no option 'maxlen'; did you mean 'max_len'?"),
    "unknown transform": ("to: reader}", "to: reader, transform: text.lower}",
        "7: unknown transform 'text.lower'; known: frames.wider, text.split, text.upper"),
    "dangling edge": ("to: singer}", "to: singr}", "8: unknown stage 'singr'; did you mean 'singer'?"),
    "cycle": ("outputs:", "  - {from: singer, to: reader}\noutputs:",
        "9: cycle reader -> singer -> reader; remove one of these edges"),
    "edge given twice": ("outputs:", "  - {from: reader, to: singer}\noutputs:",
        "9: edge 'reader->singer' exists already; give this edge another `name`"),
    "stage that is not fed": ("  - {from: reader, to: singer}\n", "",
        "5: no edge leads to stage 'singer', which accepts frames: float32[frames, 8]; add one to `edges`"),
    "stage that lacks a tensor": ("function: read", "function: mix",
        "4: no edge brings stage 'reader' its frames: float32[frames, 8]; add one, or change a transform"),
    "stage without use": ("edges:", "  idle: {engine: plain, function: talk}\nedges:",
        "6: no output depends on stage 'idle'; name it in `outputs`, add an edge, or remove it"),
    "prompt stage that is fed": ("outputs:", "  - {from: singer, to: thinker}\noutputs:",
        "3: stage 'thinker' takes the client's prompt and no tensors; remove its edges"),
    "type mismatch": ("function: sing", "function: wide",
        ("8: type mismatch: stage 'reader' gives frames: float32[frames, 8], stage 'singer' expects frames: "
         "float32[frames, 16]; add or change the edge's transform")),
    "transform that takes something else": ("to: reader}", "to: reader, transform: frames.wider}",
        ("7: transform 'frames.wider' takes frames: float32[frames, 8], but stage 'thinker' emits text: "
         "uint8[bytes], token_ids: int64[n]; choose another transform")),
    "edge that brings nothing": ("{from: reader, to: singer}", "{from: thinker, to: singer}",
        ("8: stage 'thinker' gives text: uint8[bytes], token_ids: int64[n], but stage 'singer' accepts only frames: "
         "float32[frames, 8]; add a transform, or remove the edge")),
    "unknown connector": ("to: reader}", "to: reader, connector: tcp}",
        "7: unknown connector 'tcp'; use one of auto, shm, nixl, grpc"),
    "chunk without frames": ("to: singer}", "to: singer, chunk: {frames: 0}}",
        "8: edges.1.chunk.frames is 0; input should be greater than or equal to 1"),
    "unknown tokens": ("to: reader}", "to: reader, tokens: first}",
        "7: edges.0.tokens is 'first'; input should be 'all' or 'last'"),
    "unknown chunk policy": ("to: singer}", "to: singer, chunk: all}",
        "8: edges.1.chunk is 'all'; input should be 'step' or 'whole'"),
    "frames of nothing in common": ("to: reader}", "to: reader, chunk: {frames: 4}}",
        ("7: the tensors that stage 'thinker' emits have no common first axis to cut frames from (text: "
         "uint8[bytes], token_ids: int64[n]); use `step` or `whole`")),
    "first chunk larger than the others": ("to: singer}", "to: singer, chunk: {frames: 4, initial_frames: 8}}",
        ("8: edges.1.chunk is {'frames': 4, 'initial_frames': 8}; make initial_frames and the sizes in ramp at most "
         "`frames`")),
    "ramp with another first chunk": ("to: singer}", "to: singer, chunk: {frames: 4, initial_frames: 2, ramp: [1]}}",
        ("8: edges.1.chunk is {'frames': 4, 'initial_frames': 2, 'ramp': [1]}; remove initial_frames, because ramp "
         "begins with the size of the first chunk")),
    "automatic ramp without a least size": ("to: singer}", "to: singer, chunk: {frames: 4, ramp: auto}}",
        ("8: edges.1.chunk is {'frames': 4, 'ramp': 'auto'}; add initial_frames, the least size of a chunk that "
         "`ramp: auto` may choose")),
    "ramp of another word": ("to: singer}", "to: singer, chunk: {frames: 4, ramp: fast}}",
        "8: edges.1.chunk.ramp is 'fast'; input should be 'auto'"),
    "ramp without sizes": ("to: singer}", "to: singer, chunk: {frames: 4, ramp: []}}",
        "8: edges.1.chunk.ramp is empty; add at least one item"),
    "ramp with an empty chunk": ("to: singer}", "to: singer, chunk: {frames: 4, ramp: [1, 0]}}",
        "8: edges.1.chunk.ramp.1 is 0; input should be greater than or equal to 1"),
    "automatic ramp without audio": (
        "function: sing", "function: drawl", "to: singer}",
        "to: singer, chunk: {frames: 4, initial_frames: 1, ramp: auto}}",
        "8: `ramp: auto` needs a stage that emits audio, but 'singer' does not; list the sizes instead"),
    "output of no stage": ("audio: singer", "audio: singr",
        "9: output 'audio' names an unknown stage 'singr'; did you mean 'singer'?"),
    "output of no tensor": ("audio: singer", "audio: singer.video",
        "9: stage 'singer' does not emit 'video'; known: audio"),
    "ambiguous output": ("text: thinker", "words: thinker",
        "9: stage 'thinker' emits text, token_ids; choose one as thinker.TENSOR"),
    "output given twice": ("text: thinker", "text: thinker, again: thinker.text",
        "9: thinker.text is already the output 'text'; keep one of them"),
    "unknown key of an output": ("audio: singer", "audio: {from: singer, stord: true}",
        "9: unknown key 'outputs.audio.stord'; did you mean 'stored'?"),
    "output without an origin": ("audio: singer", "audio: {stored: true}", "9: outputs.audio has no 'from'; add it"),
    "frame rate of 0": ("audio: singer", "audio: {from: singer, frame_rate: 0}",
        "9: outputs.audio.frame_rate is 0; input should be greater than 0"),
    "media type of another kind": ("audio: singer", "audio: {from: singer, media_type: video/mp4}",
        ("9: singer (audio, float32[samples]) cannot be encoded as 'video/mp4'; use one of audio/wav, audio/flac, "
         "audio/ogg, audio/mpeg, application/octet-stream")),
    "frame rate of audio": ("audio: singer", "audio: {from: singer, frame_rate: 24}",
        "9: frame_rate is given for audio; remove it, or use a video's media_type"),
    "stored without a store": ("audio: singer", "audio: {from: singer, media_type: audio/ogg, stored: true}",
        "9: the output is to be stored, but the pipeline has no object store; add `media: {store: FOLDER OR URL}`"),
    "stored without a media type": ("audio: singer}", "audio: {from: singer, stored: true}}\nmedia: {store: /tmp/m}",
        "9: outputs.audio is stored without a media type; add `media_type: audio/wav`"),
    "no outputs": ("{text: thinker, audio: singer}", "{}", "9: outputs is empty; add at least one item"),
    "bad limit": ("outputs:", "limits: {max_in_flight: none}\noutputs:",
        "9: limits.max_in_flight is 'none'; input should be a valid integer"),
    "unknown limit": ("outputs:", "limits: {max_queue: 3}\noutputs:",
        "9: unknown key 'limits.max_queue'; did you mean 'max_queued'?"),
    "limit of no bytes": ("outputs:", "limits: {max_in_flight_bytes: 0}\noutputs:",
        "9: limits.max_in_flight_bytes is 0; input should be greater than or equal to 1"),
    "choices that never run": ("outputs:", "limits: {max_in_flight: 3, max_choices: 4}\noutputs:",
        "9: limits.max_choices is 4, but max_in_flight allows 3; lower it"),
    "unknown limit by caller": ("outputs:", "limits:\n  per_caller: {queued: 3}\noutputs:",
        "10: unknown key 'limits.per_caller.queued'; did you mean 'max_queued'?"),
    "caller's limit that is never reached": ("outputs:", "limits:\n  per_caller: {max_queued: 300}\noutputs:",
        "10: limits.per_caller.max_queued is 300, more than limits.max_queued (256); lower it, or remove it"),
    "variable that is not set": ("function: read", "function: ${FUNCTION}",
        "4: variable FUNCTION is not set; set it, or write ${FUNCTION:-default}"),
    "model left out": ("engine: plain, function: talk", "engine: heavy",
        "3: engine 'heavy' needs a model; add `model: NAME or PATH`"),
    "broken YAML": ("to: reader}", "to: reader",
        "8: invalid YAML: expected ',' or '}', but got '{'; correct this line or the one before it"),
})  # fmt: skip
def test_a_mistake_is_reported_with_its_line_and_remedy(tmp_path: Path, text: str, error: str) -> None:
    assert error in errors(tmp_path, text)


def test_all_mistakes_are_reported_in_the_files_order(tmp_path: Path) -> None:
    text = GOOD.replace("talk", "talc").replace("sing}", "sin}").replace("audio: singer", "audio: nobody")
    assert [line.split(": ")[0] for line in errors(tmp_path, text)] == ["3", "5", "9"]


def test_an_error_in_an_override_names_the_option(tmp_path: Path) -> None:
    assert errors(tmp_path, GOOD, overrides={"stages.reader.replicas": "many"}) == [
        "--set stages.reader.replicas: stages.reader.replicas is 'many'; input should be a valid integer"
    ]


def test_an_override_of_an_unknown_key_is_rejected(tmp_path: Path) -> None:
    assert errors(tmp_path, GOOD, overrides={"stages.nobody.replicas": "2"}) == [
        "--set stages.nobody.replicas: the pipeline has no such key; see `stagemesh pipeline explain` for the keys"
    ]


def test_shm_from_a_private_arena_is_rejected(tmp_path: Path) -> None:
    text = GOOD.replace("function: read", "function: read, data_plane: {shared_arena: false}")
    (error,) = errors(tmp_path, text, overrides={"edges.1.connector": "shm"})
    assert "shm needs a shared arena; remove data_plane.shared_arena from stage 'reader'" in error


def test_an_error_in_a_variables_value_names_the_variable(tmp_path: Path) -> None:
    (error,) = errors(tmp_path, GOOD.replace("function: read", "function: ${F}"), variables={"F": "reed"})
    assert error.startswith("4 (variable F): unknown function 'reed'")


def test_a_file_without_a_mapping_is_rejected(tmp_path: Path) -> None:
    assert errors(tmp_path, "- a\n- b\n")[0].startswith("1: the file does not contain a mapping")


def test_a_missing_model_names_the_searched_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEMESH_HOME", "/home-of-models")
    text = GOOD.replace("engine: plain, function: talk", "engine: heavy, model: smol")
    (error,) = errors(tmp_path, text)
    assert error.startswith("3: model 'smol' is missing (searched smol and /home-of-models/models/smol); ")
    assert error.endswith("; run `stagemesh models fetch`, or give the path of a folder or file")


@pytest.mark.parametrize(
    ("name", "remedy"), [("speach", "did you mean 'speech'"), ("nowhere/pipeline.yaml", "built-in: speech")]
)
def test_the_error_for_an_unknown_pipeline_names_built_in_pipelines(name: str, remedy: str) -> None:
    with raises(NotFoundError, reason="UNKNOWN_PIPELINE", match=remedy):
        load_pipeline(name)


def test_stages_come_producers_first(tmp_path: Path) -> None:
    shuffled = GOOD.replace("stages:\n", "stages:\n  early: {engine: plain, function: sing}\n")
    shuffled = shuffled.replace("outputs: {", "  - {from: reader, to: early}\noutputs: {early: early, ")
    assert list(load(tmp_path, shuffled).stages) == ["thinker", "reader", "early", "singer"]


def test_an_output_has_its_tensor_and_kind(tmp_path: Path) -> None:
    output = load(tmp_path, GOOD).outputs["audio"]
    assert (output.stage, output.tensor, output.kind) == ("singer", "audio", "audio")


def _with_video(tensor: str, keys: str) -> str:
    """Returns a file with an output of a stage that makes a video and images, and with these further keys."""
    entry = f"film: {{from: singer.{tensor}, {keys}}}}}"
    return GOOD.replace("sing}", "film}").replace("audio: singer}", entry) + "media: {store: /srv/media}\n"


def test_an_output_may_be_a_stored_file(tmp_path: Path) -> None:
    pipeline = load(tmp_path, _with_video("video", "media_type: video/mp4, frame_rate: 24, stored: true"))
    video = pipeline.outputs["film"]
    assert (video.stage, video.tensor, video.file_type, video.frame_rate) == ("singer", "video", "video/mp4", 24)
    assert video.folder_uri == "file:///srv/media/outputs"
    rows = {row.key: (row.value, row.origin.rpartition(":")[2]) for row in pipeline.explanation}
    assert rows["outputs.film.from"] == ("singer.video", "9")
    assert rows["outputs.film.stored"] == ("true", "9")
    assert rows["outputs.text"] == ("thinker", "9")


@pytest.mark.parametrize(
    ("tensor", "entry", "said"),
    [
        ("video", "media_type: video/mp4", "outputs.film is a video without a frame rate; add `frame_rate: 24`"),
        ("video", "media_type: application/octet-stream, frame_rate: 2", "frame_rate is given for application/octet"),
        ("video", "media_type: image/png", "float32[frames, 3, height, width]) cannot be encoded as 'image/png'"),
        ("poster", "media_type: image/png", "remove media_type, because the stage emits whole files"),
    ],
)
def test_a_file_must_fit_the_tensor(tmp_path: Path, tensor: str, entry: str, said: str) -> None:
    with pytest.raises(InvalidPipelineError, match=re.escape(said)):
        load(tmp_path, _with_video(tensor, entry))


def test_images_are_stored_as_they_are(tmp_path: Path) -> None:
    assert load(tmp_path, _with_video("poster", "stored: true")).outputs["film"].file_type == ""


def test_a_chunk_policy_is_a_word_or_frames(tmp_path: Path) -> None:
    text = GOOD.replace("to: singer}", "to: singer, chunk: {frames: 9, initial_frames: 3}}")
    first, second = load(tmp_path, text).edges
    assert (first.policy, second.policy) == (StepPolicy(), FramesPolicy(9, (3,)))


def test_a_transform_may_change_the_type(tmp_path: Path) -> None:
    text = GOOD.replace("function: sing", "function: wide").replace("audio: singer", "audio: singer.text")
    text = text.replace("to: singer}", "to: singer, transform: frames.wider}")
    assert load(tmp_path, text).edges[1].transform == "frames.wider"


def test_two_edges_may_feed_one_stage(tmp_path: Path) -> None:
    outputs = "  - {from: thinker, to: singer}\noutputs: {text: singer}"
    text = edited(GOOD, "function: sing", "function: mix", "outputs: {text: thinker, audio: singer}", outputs)
    assert len(load(tmp_path, text).incoming("singer")) == 2


def test_a_variable_keeps_its_type_and_place_in_braces(tmp_path: Path) -> None:
    text = GOOD.replace("function: read", "function: ${F:-read}, replicas: ${N:-3}")
    assert load(tmp_path, text).stages["reader"].replicas == 3
    assert load(tmp_path, text, variables={"N": "5"}).stages["reader"].replicas == 5


def test_a_variable_cannot_change_the_files_structure(tmp_path: Path) -> None:
    text = GOOD.replace("function: read", "function: read, model: ${M}")
    model = "x, replicas: 9} # "
    pipeline = load(tmp_path, text, variables={"M": model}, check_models=False)
    assert (pipeline.stages["reader"].model_name, pipeline.stages["reader"].replicas) == (model, 1)


def test_a_doubled_dollar_is_not_a_reference(tmp_path: Path) -> None:
    text = GOOD.replace("function: read", "function: read, options: {device: '$${X}'}")
    assert load(tmp_path, text).stages["reader"].options == {"device": "${X}"}


def test_overrides_apply_to_all_edges_and_to_new_options(tmp_path: Path) -> None:
    overrides = {"edges.*.connector": "grpc", "edges.*.chunk": "whole", "stages.reader.options.max_len": "7"}
    pipeline = load(tmp_path, GOOD, overrides=overrides)
    assert {(edge.connector, edge.policy) for edge in pipeline.edges} == {(GRPC, WholePolicy())}
    assert pipeline.stages["reader"].options == {"max_len": 7}


def test_an_override_may_name_an_edge(tmp_path: Path) -> None:
    pipeline = load(tmp_path, GOOD, overrides={"edges.reader->singer.connector": "shm"})
    assert [edge.connector for edge in pipeline.edges] == [AUTO, SHM]


def test_the_generation_changes_with_the_stages_alone(tmp_path: Path) -> None:
    first = load(tmp_path, GOOD).generation
    others = {"edges.*.connector": "grpc", "stages.reader.replicas": "2"}
    assert load(tmp_path, GOOD, overrides=others).generation == first
    assert load(tmp_path, GOOD, overrides={"stages.reader.options.max_len": "7"}).generation != first


def test_a_value_is_explained_by_its_origin(tmp_path: Path) -> None:
    text = GOOD.replace("function: read", "function: read, replicas: ${N:-2}, options: {device: '${D}'}")
    rows = load(tmp_path, text, variables={"D": "cpu"}, overrides={"edges.0.connector": "shm"}).explanation
    origins = {row.key: (row.value, row.origin.replace(str(tmp_path), ".")) for row in rows}
    assert origins["stages.reader.engine"] == ("plain", "./pipeline.yaml:4")
    assert origins["stages.reader.replicas"] == ("2", "./pipeline.yaml:4")
    assert origins["stages.reader.options.device"] == ("cpu", "variable D")
    assert origins["edges.0.connector"] == ("shm", "override")
    assert origins["limits.max_in_flight"] == ("64", "default")


def test_limits_have_defaults_and_may_be_set_by_caller(tmp_path: Path) -> None:
    overrides = {"limits.max_queued": "0", "limits.per_caller.max_in_flight": "2"}
    pipeline = load(tmp_path, GOOD, overrides=overrides)
    assert pipeline.limits == Limits(max_queued=0, per_caller=Bounds(max_in_flight=2))
    rows = {row.key: (row.value, row.origin) for row in pipeline.explanation}
    assert rows["limits.per_caller.max_in_flight"] == ("2", "override")
    assert rows["limits.max_in_flight_bytes"] == (str(4 << 30), "default")
    assert "limits.per_caller.max_queued" not in rows


def test_models_need_not_exist_without_the_check_of_models(tmp_path: Path) -> None:
    text = GOOD.replace("engine: plain, function: talk", "engine: heavy, model: smol")
    assert load(tmp_path, text, check_models=False).stages["thinker"].model_path is None


@pytest.mark.parametrize("name", built_in_pipelines())
def test_built_in_pipelines_are_valid(name: str) -> None:
    assert load_pipeline(name, variables={}, check_models=False).name == name
