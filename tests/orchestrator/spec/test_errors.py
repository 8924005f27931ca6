"""Every mistake that a pipeline file can contain, with the exact line and text of the report."""

from pathlib import Path

import pytest

from stagemesh.common.errors import InvalidPipelineError, NotFoundError
from stagemesh.pipeline import load_pipeline
from tests.orchestrator.spec.catalog import CATALOG

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


def _error(folder: Path, text: str, *, overrides: dict[str, str] | None = None) -> str:
    """Returns the error for a file with this text, with the file's name instead of its path."""
    path = folder / "song.yaml"
    path.write_text(text)
    with pytest.raises(InvalidPipelineError) as caught:
        load_pipeline(str(path), catalog=CATALOG, variables={}, overrides=overrides)
    return caught.value.message.replace(str(path), "song.yaml")


CASES: dict[str, tuple[str, str, str]] = {
    "unknown key": ("engine: plain, function: talk", "engine: plain, function: talk, modle: x",
        "song.yaml:3: unknown key 'stages.thinker.modle'; did you mean 'model'?"),
    "unknown key at the top": ("outputs:", "output: {}\noutputs:",
        "song.yaml:9: unknown key 'output'; did you mean 'outputs'?"),
    "key given twice": ("edges:", "  thinker: {engine: plain, function: talk}\nedges:",
        "song.yaml:6: stages.thinker is given twice (first on line 3); keep one"),
    "missing key": ("{from: thinker, to: reader}", "{from: thinker}",
        "song.yaml:7: edges.0 has no 'to'; add it"),
    "bad number of replicas": ("function: read", "function: read, replicas: 0",
        "song.yaml:4: stages.reader.replicas is 0; input should be greater than or equal to 1"),
    "bad stage name": ("  singer: ", "  Singer: {engine: plain, function: sing}\n  singer: ",
        ("song.yaml:5: 'stages.Singer' is not a valid name; use lower-case letters, digits and '-', a letter "
        "first")),
    "bad pipeline name": ("pipeline: song", "pipeline: My Song",
        "song.yaml:1: pipeline is 'My Song'; use lower-case letters, digits and '-', a letter first"),
    "unknown engine": ("engine: plain, function: read", "engine: plane, function: read",
        "song.yaml:4: unknown engine 'plane'; known: heavy, lone, plain"),
    "unknown function": ("function: read", "function: reed",
        ("song.yaml:4: unknown function 'reed'; known: blend, drawl, film, hear, lipread, listen, mix, read, sing, "
        "talk, wide")),
    "function left out": ("{engine: plain, function: read}", "{engine: plain}",
        "song.yaml:4: engine 'plain' runs a function; add `function: NAME`"),
    "unknown stage option": ("function: read", "function: read, options: {maxlen: 3}",
        "song.yaml:4: engine 'plain' has no option 'maxlen'; did you mean 'max_len'?"),
    "unknown transform": ("to: reader}", "to: reader, transform: text.lower}",
        "song.yaml:7: unknown transform 'text.lower'; known: frames.wider, text.split, text.upper"),
    "dangling edge": ("to: singer}", "to: singr}",
        "song.yaml:8: unknown stage 'singr'; did you mean 'singer'?"),
    "cycle": ("outputs:", "  - {from: singer, to: reader}\noutputs:",
        "song.yaml:9: cycle reader -> singer -> reader; remove one of these edges"),
    "edge given twice": ("outputs:", "  - {from: reader, to: singer}\noutputs:",
        "song.yaml:9: edge 'reader->singer' exists already; give this edge another `name`"),
    "stage that is not fed": ("  - {from: reader, to: singer}\n", "",
        "song.yaml:5: no edge leads to stage 'singer', which accepts frames: float32[frames, 8]; add one to `edges`"),
    "stage that lacks a tensor": ("function: read", "function: mix",
        "song.yaml:4: no edge brings stage 'reader' its frames: float32[frames, 8]; add one, or change a transform"),
    "stage without use": ("edges:", "  idle: {engine: plain, function: talk}\nedges:",
        "song.yaml:6: no output depends on stage 'idle'; name it in `outputs`, add an edge, or remove it"),
    "prompt stage that is fed": ("outputs:", "  - {from: singer, to: thinker}\noutputs:",
        "song.yaml:3: stage 'thinker' takes the client's prompt and no tensors; remove its edges"),
    "type mismatch": ("function: sing", "function: wide",
        ("song.yaml:8: type mismatch: stage 'reader' gives frames: float32[frames, 8], stage 'singer' expects "
        "frames: float32[frames, 16]; add or change the edge's transform")),
    "transform that takes something else": ("to: reader}", "to: reader, transform: frames.wider}",
        ("song.yaml:7: transform 'frames.wider' takes frames: float32[frames, 8], but stage 'thinker' emits "
        "text: uint8[bytes], token_ids: int64[n]; choose another transform")),
    "edge that brings nothing": ("{from: reader, to: singer}", "{from: thinker, to: singer}",
        ("song.yaml:8: stage 'thinker' gives text: uint8[bytes], token_ids: int64[n], but stage 'singer' "
        "accepts only frames: float32[frames, 8]; add a transform, or remove the edge")),
    "unknown connector": ("to: reader}", "to: reader, connector: tcp}",
        "song.yaml:7: unknown connector 'tcp'; use one of auto, shm, nixl, grpc"),
    "chunk without frames": ("to: singer}", "to: singer, chunk: {frames: 0}}",
        "song.yaml:8: edges.1.chunk.frames is 0; input should be greater than or equal to 1"),
    "unknown tokens": ("to: reader}", "to: reader, tokens: first}",
        "song.yaml:7: edges.0.tokens is 'first'; input should be 'all' or 'last'"),
    "unknown chunk policy": ("to: singer}", "to: singer, chunk: all}",
        "song.yaml:8: edges.1.chunk is 'all'; input should be 'step' or 'whole'"),
    "frames of nothing in common": ("to: reader}", "to: reader, chunk: {frames: 4}}",
        ("song.yaml:7: the tensors that stage 'thinker' emits have no common first axis to cut frames from "
        "(text: uint8[bytes], token_ids: int64[n]); use `step` or `whole`")),
    "first chunk larger than the others": ("to: singer}", "to: singer, chunk: {frames: 4, initial_frames: 8}}",
        ("song.yaml:8: edges.1.chunk is {'frames': 4, 'initial_frames': 8}; make initial_frames and the sizes in ramp "
        "at most `frames`")),
    "ramp with another first chunk": ("to: singer}", "to: singer, chunk: {frames: 4, initial_frames: 2, ramp: [1]}}",
        ("song.yaml:8: edges.1.chunk is {'frames': 4, 'initial_frames': 2, 'ramp': [1]}; remove initial_frames, "
        "because ramp begins with the size of the first chunk")),
    "automatic ramp without a least size": ("to: singer}", "to: singer, chunk: {frames: 4, ramp: auto}}",
        ("song.yaml:8: edges.1.chunk is {'frames': 4, 'ramp': 'auto'}; add initial_frames, the least size of a chunk "
        "that `ramp: auto` may choose")),
    "ramp of another word": ("to: singer}", "to: singer, chunk: {frames: 4, ramp: fast}}",
        "song.yaml:8: edges.1.chunk.ramp is 'fast'; input should be 'auto'"),
    "ramp without sizes": ("to: singer}", "to: singer, chunk: {frames: 4, ramp: []}}",
        "song.yaml:8: edges.1.chunk.ramp is empty; add at least one item"),
    "ramp with an empty chunk": ("to: singer}", "to: singer, chunk: {frames: 4, ramp: [1, 0]}}",
        "song.yaml:8: edges.1.chunk.ramp.1 is 0; input should be greater than or equal to 1"),
    "automatic ramp without audio": ("sing}\nedges:\n  - {from: thinker, to: reader}\n  - {from: reader, to: singer}",
        ("drawl}\nedges:\n  - {from: thinker, to: reader}\n"
        "  - {from: reader, to: singer, chunk: {frames: 4, initial_frames: 1, ramp: auto}}"),
        ("song.yaml:8: `ramp: auto` needs a stage that emits audio, but 'singer' does not; list the sizes instead")),
    "output of no stage": ("audio: singer", "audio: singr",
        "song.yaml:9: output 'audio' names an unknown stage 'singr'; did you mean 'singer'?"),
    "output of no tensor": ("audio: singer", "audio: singer.video",
        "song.yaml:9: stage 'singer' does not emit 'video'; known: audio"),
    "ambiguous output": ("text: thinker", "words: thinker",
        "song.yaml:9: stage 'thinker' emits text, token_ids; choose one as thinker.TENSOR"),
    "output given twice": ("text: thinker", "text: thinker, again: thinker.text",
        "song.yaml:9: thinker.text is already the output 'text'; keep one of them"),
    "unknown key of an output": ("audio: singer", "audio: {from: singer, stord: true}",
        "song.yaml:9: unknown key 'outputs.audio.stord'; did you mean 'stored'?"),
    "output without an origin": ("audio: singer", "audio: {stored: true}",
        "song.yaml:9: outputs.audio has no 'from'; add it"),
    "frame rate of 0": ("audio: singer", "audio: {from: singer, frame_rate: 0}",
        "song.yaml:9: outputs.audio.frame_rate is 0; input should be greater than 0"),
    "media type of another kind": ("audio: singer", "audio: {from: singer, media_type: video/mp4}",
        ("song.yaml:9: singer (audio, float32[samples]) cannot be encoded as 'video/mp4'; use one of audio/wav, "
         "audio/flac, audio/ogg, audio/mpeg, application/octet-stream")),
    "frame rate of audio": ("audio: singer", "audio: {from: singer, frame_rate: 24}",
        "song.yaml:9: frame_rate is given for audio; remove it, or use a video's media_type"),
    "stored without a store": ("audio: singer", "audio: {from: singer, media_type: audio/ogg, stored: true}",
        ("song.yaml:9: the output is to be stored, but the pipeline has no object store; add `media: {store: FOLDER OR "
         "URL}`")),
    "stored without a media type": ("audio: singer}", "audio: {from: singer, stored: true}}\nmedia: {store: /tmp/m}",
        "song.yaml:9: outputs.audio is stored without a media type; add `media_type: audio/wav`"),
    "no outputs": ("{text: thinker, audio: singer}", "{}",
        "song.yaml:9: outputs is empty; add at least one item"),
    "bad limit": ("outputs:", "limits: {max_in_flight: none}\noutputs:",
        "song.yaml:9: limits.max_in_flight is 'none'; input should be a valid integer"),
    "unknown limit": ("outputs:", "limits: {max_queue: 3}\noutputs:",
        "song.yaml:9: unknown key 'limits.max_queue'; did you mean 'max_queued'?"),
    "limit of no bytes": ("outputs:", "limits: {max_in_flight_bytes: 0}\noutputs:",
        "song.yaml:9: limits.max_in_flight_bytes is 0; input should be greater than or equal to 1"),
    "choices that never run": ("outputs:", "limits: {max_in_flight: 3, max_choices: 4}\noutputs:",
        "song.yaml:9: limits.max_choices is 4, but max_in_flight allows 3; lower it"),
    "unknown limit by caller": ("outputs:", "limits:\n  per_caller: {queued: 3}\noutputs:",
        "song.yaml:10: unknown key 'limits.per_caller.queued'; did you mean 'max_queued'?"),
    "caller's limit that is never reached": ("outputs:", "limits:\n  per_caller: {max_queued: 300}\noutputs:",
        ("song.yaml:10: limits.per_caller.max_queued is 300, more than limits.max_queued (256); lower it, or "
        "remove it")),
    "variable that is not set": ("function: read", "function: ${FUNCTION}",
        "song.yaml:4: variable FUNCTION is not set; set it, or write ${FUNCTION:-default}"),
    "model left out": ("engine: plain, function: talk", "engine: heavy",
        "song.yaml:3: engine 'heavy' needs a model; add `model: NAME or PATH`"),
    "broken YAML": ("to: reader}", "to: reader",
        "song.yaml:8: invalid YAML: expected ',' or '}', but got '{'; correct this line or the one before it"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_mistake_is_reported_with_its_line_and_remedy(case: str, tmp_path: Path) -> None:
    before, after, message = CASES[case]
    assert before in GOOD
    assert message in _error(tmp_path, GOOD.replace(before, after)).splitlines()


def test_all_mistakes_are_reported_in_the_files_order(tmp_path: Path) -> None:
    text = GOOD.replace("talk", "talc").replace("sing}", "sin}").replace("audio: singer", "audio: nobody")
    lines = _error(tmp_path, text).splitlines()
    assert [line.split(": ")[0] for line in lines] == ["song.yaml:3", "song.yaml:5", "song.yaml:9"]


def test_an_error_in_an_override_names_the_option(tmp_path: Path) -> None:
    assert _error(tmp_path, GOOD, overrides={"stages.reader.replicas": "many"}) == (
        "--set stages.reader.replicas: stages.reader.replicas is 'many'; input should be a valid integer"
    )


def test_an_override_of_an_unknown_key_is_rejected(tmp_path: Path) -> None:
    assert _error(tmp_path, GOOD, overrides={"stages.nobody.replicas": "2"}) == (
        "--set stages.nobody.replicas: the pipeline has no such key; see `stagemesh pipeline explain` for the keys"
    )


def test_shm_from_a_private_arena_is_rejected(tmp_path: Path) -> None:
    text = GOOD.replace("function: read", "function: read, data_plane: {shared_arena: false}")
    error = _error(tmp_path, text, overrides={"edges.1.connector": "shm"})
    assert "shm needs a shared arena; remove data_plane.shared_arena from stage 'reader'" in error


def test_an_error_in_a_variables_value_names_the_variable(tmp_path: Path) -> None:
    path = tmp_path / "song.yaml"
    path.write_text(GOOD.replace("function: read", "function: ${F}"))
    with pytest.raises(InvalidPipelineError, match=r"song.yaml:4 \(variable F\): unknown function 'reed'"):
        load_pipeline(str(path), catalog=CATALOG, variables={"F": "reed"})


def test_a_file_without_a_mapping_is_rejected(tmp_path: Path) -> None:
    assert _error(tmp_path, "- a\n- b\n").startswith("song.yaml:1: the file does not contain a mapping")


def test_a_missing_model_names_the_searched_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAGEMESH_HOME", "/home-of-models")
    text = GOOD.replace("engine: plain, function: talk", "engine: heavy, model: smol")
    assert _error(tmp_path, text) == (
        "song.yaml:3: model 'smol' is missing (searched smol and /home-of-models/models/smol); "
        "run `stagemesh models fetch`, or give the path of a folder or file"
    )


def test_an_unknown_pipeline_names_a_similar_built_in_pipeline() -> None:
    with pytest.raises(NotFoundError, match="did you mean 'speech'") as caught:
        load_pipeline("speach")
    assert caught.value.reason == "UNKNOWN_PIPELINE"


def test_an_unknown_pipeline_lists_all_built_in_pipelines() -> None:
    with pytest.raises(NotFoundError, match="built-in: speech"):
        load_pipeline("nowhere/pipeline.yaml")
