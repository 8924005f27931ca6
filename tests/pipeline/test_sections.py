"""The sections `media`, `sessions` and `limits` of a pipeline file."""

from pathlib import Path

from stagemesh.pipeline.conditions import STREAMED
from stagemesh.pipeline.graph import SPEECH
from tests.pipeline.files import good, load

EYE = good("media")


def test_media_names_the_store_and_further_locations(tmp_path: Path) -> None:
    media = load(tmp_path, EYE, engines=None).media
    assert media is not None
    assert media.roots == ("/data/media", "file:///data/public")
    assert media.max_file_bytes == 1 << 30
    assert media.uri_of("uploads", "a.png") == "file:///data/media/uploads/a.png"


def test_a_pipeline_has_no_store_by_default(tmp_path: Path) -> None:
    text = EYE.replace("  store: /data/media\n  allowed: [file:///data/public]\n", "").replace("media:\n", "")
    assert load(tmp_path, text, engines=None).media is None


def test_only_the_machine_that_runs_the_stages_needs_the_packages(tmp_path: Path) -> None:
    text = EYE.replace("/data/media", "foo://bucket/prefix")
    media = load(tmp_path, text, engines=None, check_models=False).media
    assert media is not None
    assert media.uri_of("a") == "foo://bucket/prefix/a"


LISTEN = good("sessions")


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
