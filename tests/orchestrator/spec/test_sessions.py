"""The settings of sessions in a pipeline file."""

from pathlib import Path

import pytest

from stagemesh.common.errors import InvalidPipelineError
from stagemesh.pipeline import Pipeline, load_pipeline
from stagemesh.pipeline.conditions import STREAMED
from stagemesh.pipeline.graph import SPEECH
from tests.orchestrator.spec.catalog import CATALOG

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


def load(folder: Path, text: str) -> Pipeline:
    path = folder / "listen.yaml"
    path.write_text(text)
    return load_pipeline(str(path), catalog=CATALOG)


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


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("detection: ears", "detection: eyes", ":8: unknown stage 'eyes'; known: ears, thinker"),
        ("detection: ears", "detection: thinker", ":8: stage 'thinker' does not emit speech: float64[events, 2]"),
        ("function: hear}", "function: lipread}", ":8: stage 'ears' does not emit speech: float64[events, 2]"),
        (
            '{from: "@input", to: ears}',
            "{from: thinker, to: ears, transform: text.upper}",
            ":6: transform 'text.upper' gives text: uint8[bytes], but stage 'ears' accepts only",
        ),
        ("park_s: 5", "park_s: -1", ":8: sessions.park_s is -1"),
        ("park_s: 5", "park: 5", ":8: unknown key 'sessions.park'; did you mean 'park_s'?"),
        ("max_sessions: 7", "max_sessions: 0", ":9: limits.max_sessions is 0"),
        (
            "per_caller: {max_sessions: 2}",
            "per_caller: {max_sessions: 8}",
            ":9: limits.per_caller.max_sessions is 8, more than limits.max_sessions (7)",
        ),
        (", turn_detection: ears", "", "no output depends on stage 'ears'"),
    ],
)
def test_a_mistake_is_reported_with_its_line(tmp_path: Path, old: str, new: str, problem: str) -> None:
    assert old in LISTEN
    with pytest.raises(InvalidPipelineError) as caught:
        load(tmp_path, LISTEN.replace(old, new))
    assert problem in caught.value.message
