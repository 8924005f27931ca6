"""Pipeline files: how they are read, and every mistake that they can contain, with the exact line and text."""

import re
from pathlib import Path

import pytest

from stagemesh.common.errors import InvalidPipelineError, NotFoundError
from stagemesh.common.plugins.connectors import AUTO, GRPC, SHM
from stagemesh.common.wire.chunk_sizes import FramesPolicy, StepPolicy, WholePolicy
from stagemesh.pipeline import Bounds, Limits, built_in_pipelines, load_pipeline
from tests.pipeline.files import edited, errors, good, load
from tests.rpc.call_errors import raises

GOOD = good("song")


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
