"""The sections `media`, `sessions` and `limits` of a pipeline file."""

from pathlib import Path

from stagemesh.pipeline.conditions import STREAMED
from stagemesh.pipeline.graph import SPEECH
from tests.pipeline.files import errors, load, mistakes

EYE = """\
pipeline: eye
media:
  store: /data/media
  allowed: [file:///data/public]
stages:
  eye: {engine: fake, function: look}
outputs: {text: eye}
"""


def test_media_names_the_store_and_further_locations(tmp_path: Path) -> None:
    media = load(tmp_path, EYE, catalog=None).media
    assert media is not None
    assert media.roots == ("/data/media", "file:///data/public")
    assert media.max_file_bytes == 1 << 30
    assert media.uri_of("uploads", "a.png") == "file:///data/media/uploads/a.png"


def test_a_pipeline_has_no_store_by_default(tmp_path: Path) -> None:
    text = EYE.replace("  store: /data/media\n  allowed: [file:///data/public]\n", "").replace("media:\n", "")
    assert load(tmp_path, text, catalog=None).media is None


@mistakes(EYE, {
    "relative folder": ("/data/media", "media",
        ("3: media.store is 'media'; 'media' is not a location; write an absolute folder, or a URL such as "
         "s3://bucket/prefix")),
    "folder with dots": ("/data/media", "/data/../media",
        ("3: media.store is '/data/../media'; '/data/../media' is not a location; write an absolute folder, or a "
         "URL such as s3://bucket/prefix")),
    "URL of a host": ("/data/media", "file://data",
        ("3: media.store is 'file://data'; 'file://data' is not a location; write an absolute folder, or a URL such "
         "as s3://bucket/prefix")),
    "URL without a bucket": ("/data/media", "s3://",
        ("3: media.store is 's3://'; 's3://' is not a location; write an absolute folder, or a URL such as "
         "s3://bucket/prefix")),
    "allowed URL with dots": ("file:///data/public", "s3://a/../b",
        ("4: media.allowed.0 is 's3://a/../b'; 's3://a/../b' is not a location; write an absolute folder, or a URL "
         "such as s3://bucket/prefix")),
    "unknown protocol": ("file:///data/public", "foo://bucket",
        "4: fsspec does not know foo://; use a folder, or a protocol such as s3://"),
    "misspelt key": ("store: /data/media", "stores: /data/media",
        "3: unknown key 'media.stores'; did you mean 'store'?"),
    "file size of 0": ("store: /data/media", "max_file_bytes: 0",
        "3: media.max_file_bytes is 0; input should be greater than or equal to 1"),
    "options of an unused protocol": ("store: /data/media", "storage_options: {s3: {}}",
        "3: no location of media has the protocol 's3'; known: file"),
    "no location": ("  store: /data/media\n  allowed: [file:///data/public]\n", "  max_file_bytes: 9\n",
        "2: media names no location; add `store: FOLDER OR URL`, or `allowed` locations"),
})  # fmt: skip
def test_a_mistake_in_media_is_reported_with_its_line_and_remedy(tmp_path: Path, text: str, error: str) -> None:
    assert error in errors(tmp_path, text, catalog=None)


def test_only_the_machine_that_runs_the_stages_needs_the_packages(tmp_path: Path) -> None:
    text = EYE.replace("/data/media", "foo://bucket/prefix")
    media = load(tmp_path, text, catalog=None, check_models=False).media
    assert media is not None
    assert media.uri_of("a") == "foo://bucket/prefix/a"


LISTEN = """\
pipeline: listen
stages:
  thinker: {engine: plain, function: talk}
  ears: {engine: plain, function: hear}
edges:
  - {from: "@input", to: ears}
outputs: {text: thinker.text}
sessions: {park_s: 5, turn_detection: ears}
limits: {max_sessions: 7, max_session_bytes: 1000, per_caller: {max_sessions: 2}}
"""


def test_a_file_sets_the_limits_of_sessions(tmp_path: Path) -> None:
    pipeline = load(tmp_path, LISTEN)
    assert pipeline.sessions.park_s == 5
    assert (pipeline.limits.max_sessions, pipeline.limits.max_session_bytes) == (7, 1000)
    assert pipeline.limits.per_caller.max_sessions == 2


def test_the_output_of_the_detection_is_hidden_from_clients(tmp_path: Path) -> None:
    pipeline = load(tmp_path, LISTEN)
    assert list(pipeline.outputs) == ["text"]
    assert [stage.name for stage in pipeline.route([SPEECH], {STREAMED.fact: 1.0}).stages] == ["ears"]
    assert [stage.name for stage in pipeline.route(["text"]).stages] == ["thinker"]


def test_sessions_have_default_limits(tmp_path: Path) -> None:
    text = "pipeline: p\nstages: {a: {engine: plain, function: talk}}\noutputs: {text: a.text}\n"
    pipeline = load(tmp_path, text)
    assert (pipeline.sessions.park_s, pipeline.speech) == (60, None)
    assert (pipeline.limits.max_sessions, pipeline.limits.max_session_bytes) == (1000, 32 << 20)


@mistakes(LISTEN, {
    "unknown stage": ("detection: ears", "detection: eyes", "8: unknown stage 'eyes'; known: ears, thinker"),
    "stage that detects no turns": ("detection: ears", "detection: thinker",
        ("8: stage 'thinker' does not emit speech: float64[events, 2]; name a stage that detects turns, such as "
         "audio.turns")),
    "stage with other tensors": ("function: hear}", "function: lipread}",
        ("8: stage 'ears' does not emit speech: float64[events, 2]; name a stage that detects turns, such as "
         "audio.turns")),
    "other input": ('{from: "@input", to: ears}', "{from: thinker, to: ears, transform: text.upper}",
        ("6: transform 'text.upper' gives text: uint8[bytes], but stage 'ears' accepts only audio: "
         "float32[samples]; add a transform, or remove the edge")),
    "negative time": ("park_s: 5", "park_s: -1",
        "8: sessions.park_s is -1; input should be greater than or equal to 0"),
    "misspelt key": ("park_s: 5", "park: 5", "8: unknown key 'sessions.park'; did you mean 'park_s'?"),
    "limit of 0": ("max_sessions: 7", "max_sessions: 0",
        "9: limits.max_sessions is 0; input should be greater than or equal to 1"),
    "limit above the total": ("per_caller: {max_sessions: 2}", "per_caller: {max_sessions: 8}",
        "9: limits.per_caller.max_sessions is 8, more than limits.max_sessions (7); lower it, or remove it"),
    "stage that no output needs": (", turn_detection: ears", "",
        "4: no output depends on stage 'ears'; name it in `outputs`, add an edge, or remove it"),
})  # fmt: skip
def test_a_mistake_in_sessions_is_reported_with_its_line_and_remedy(tmp_path: Path, text: str, error: str) -> None:
    assert error in errors(tmp_path, text)
