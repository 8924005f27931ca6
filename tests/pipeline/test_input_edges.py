"""Tests of edges from "@input": their mistakes, and the routes and outputs of requests that stream their input."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from stagemesh.cli.pipelines.pipeline_graph import draw_dot, draw_mermaid, draw_tree
from stagemesh.common.errors import InvalidPipelineError
from stagemesh.pipeline import Pipeline
from stagemesh.pipeline.conditions import Fact
from tests.pipeline.files import errors, load, mistakes

CHOIR = """\
pipeline: choir
stages:
  thinker: {engine: plain, function: talk}
  reader: {engine: plain, function: read}
  singer: {engine: plain, function: sing}
  ear: {engine: plain, function: hear}
edges:
  - {from: thinker, to: reader, when: {input: stream, given: false}}
  - {from: "@input", to: reader, transform: text.upper}
  - {from: reader, to: singer}
  - {from: "@input", to: ear}
outputs: {text: thinker, audio: singer, speech: ear}
"""
STREAMED = {Fact("input", "stream"): 1.0}


@mistakes(CHOIR, {
    "fixed connector": ('"@input", to: ear', '"@input", to: ear, connector: shm',
        "11: the orchestrator sends the client's input by grpc; remove `connector`"),
    "chunk": ('"@input", to: ear', '"@input", to: ear, chunk: whole',
        "11: the client's input is sent as it is appended; remove `chunk`"),
    "tokens": ('"@input", to: ear', '"@input", to: ear, tokens: last',
        "11: the client's input has no prompt; remove `tokens`"),
    "other producer": ('"@input", to: ear', '"@inputs", to: ear',
        "11: unknown stage '@inputs'; did you mean '@input'?"),
    "consumer": ("from: reader, to: singer", 'from: reader, to: "@input"',
        "10: unknown stage '@input'; known: ear, reader, singer, thinker"),
    "type": ('"@input", to: ear', '"@input", to: singer',
        ("11: the client gives text: uint8[bytes], audio: float32[samples], token_ids: int64[tokens], but stage "
         "'singer' accepts only frames: float32[frames, 8]; add a transform, or remove the edge")),
    "transform of other tensors": ('"@input", to: ear', '"@input", to: ear, transform: frames.wider',
        ("11: transform 'frames.wider' takes frames: float32[frames, 8], but the client emits text: uint8[bytes], "
         "audio: float32[samples], token_ids: int64[tokens]; choose another transform")),
    "two required kinds": ("function: hear", "function: lipread",
        ("11: stage 'ear' requires text and audio, but a packet of @input has one of text, audio; add a transform "
         "that takes only one of them")),
    "prompt in the way": (", when: {input: stream, given: false}", "",
        ("9: edge '@input->reader' never carries anything: requests that use it also need stage 'thinker', which "
         "reads a prompt, while streamed input has none; give the edges from there `when: {input: stream, given: "
         "false}`")),
    "starving edge": ('"@input", to: ear', '"@input", to: ear, when: {output: audio}',
        ("6: no edge feeds stage 'ear' when output text is not wanted and output audio is not wanted and output "
         "speech is wanted and the input is streamed; give the stage a `when`, or let an edge feed it in this case")),
    "never": ('"@input", to: ear', '"@input", to: ear, when: {input: text}',
        "11: edge '@input->ear' never carries anything: its condition contradicts those of its stages; change one"),
    "transform for an external stage": (
        "ear: {engine: plain, function: hear}",
        "ear: {engine: external, signature: {accepts: {text: 'uint8[bytes]'}, emits: {speech: 'uint8[bytes]'}}}",
        '"@input", to: ear', '"@input", to: ear, transform: text.upper',
        ("11: the orchestrator runs no transforms, and stage 'ear' is external, so that none of them can run "
         "transform 'text.upper'; put a function stage between them")),
})  # fmt: skip
def test_a_mistake_is_reported_with_its_line_and_remedy(tmp_path: Path, text: str, error: str) -> None:
    assert error in errors(tmp_path, text)


def test_a_condition_on_streamed_input_needs_an_edge_that_carries_it(tmp_path: Path) -> None:
    text = CHOIR.replace('  - {from: "@input", to: reader, transform: text.upper}\n', "")
    text = text.replace('  - {from: "@input", to: ear}\n', "").replace("ear: ", "alto: ").replace("hear", "talk")
    with pytest.raises(InvalidPipelineError, match="no edge leads from @input, so that no client can stream its input"):
        load(tmp_path, text.replace("speech: ear", "speech: alto.text"))


def test_an_edge_may_carry_several_kinds_of_input_to_a_stage_that_requires_none(tmp_path: Path) -> None:
    pipeline = load(tmp_path, CHOIR.replace("function: hear", "function: listen"))
    assert [edge.tensors for edge in pipeline.input_edges] == [("text",), ("text", "audio")]
    route = pipeline.route(["speech"], STREAMED)
    assert route.input_tensors == {"text", "audio"}
    assert route.absent(pipeline.stages["ear"]) == ()


def test_an_override_of_all_edges_omits_those_from_the_client(tmp_path: Path) -> None:
    pipeline = load(tmp_path, CHOIR, overrides={"edges.*.connector": "shm", "edges.*.chunk": "whole"})
    assert {edge.connector for edge in pipeline.edges} == {"shm"}
    assert {edge.connector for edge in pipeline.input_edges} == {"auto"}


def test_a_route_has_input_edges_only_for_streamed_input(tmp_path: Path) -> None:
    pipeline = load(tmp_path, CHOIR)
    prompted, streamed = pipeline.route(["audio"]), pipeline.route(["audio"], STREAMED)
    assert [stage.name for stage in prompted.stages] == ["thinker", "reader", "singer"]
    assert [stage.name for stage in streamed.stages] == ["reader", "singer"]
    assert ([edge.name for edge in streamed.inputs["reader"]], prompted.input_edges) == (["@input->reader"], ())
    assert streamed.absent(pipeline.stages["reader"]) == ()


def test_a_stage_lacks_its_input_if_the_client_gives_another_kind(tmp_path: Path) -> None:
    pipeline = load(tmp_path, CHOIR)
    assert [stage.name for stage in pipeline.route(["text"], STREAMED).unfed] == ["thinker"]
    assert [stage.name for stage in pipeline.route(["speech"]).unfed] == ["ear"]


def test_the_outputs_of_a_request_depend_on_the_way_of_its_input(tmp_path: Path) -> None:
    pipeline = load(tmp_path, CHOIR)
    assert pipeline.available_outputs({}) == ("text", "audio")
    assert pipeline.available_outputs(STREAMED) == ("audio", "speech")


@pytest.mark.parametrize(
    ("draw", "line"),
    [
        (draw_mermaid, '  input -->|"text.upper, text"| s1'),
        (draw_dot, '  "@input" -> "stage ear" [label="audio"];'),
        (draw_tree, "<- @input  text.upper, text"),
    ],
)
def test_a_drawing_shows_the_streamed_input(tmp_path: Path, draw: Callable[[Pipeline], object], line: str) -> None:
    drawn = draw(load(tmp_path, CHOIR))
    if not isinstance(drawn, str):
        console = Console(record=True, width=120)
        console.print(drawn)
        drawn = console.export_text()
    assert line in drawn
