"""Tests of edges from "@input": their mistakes, and the routes and outputs of requests that stream their input."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from stagemesh.cli.pipelines.pipeline_graph import draw_dot, draw_mermaid, draw_tree
from stagemesh.common.errors import InvalidPipelineError
from stagemesh.pipeline import Pipeline
from stagemesh.pipeline.conditions import Fact
from tests.pipeline.files import good, load

CHOIR = good("input")
STREAMED = {Fact("input", "stream"): 1.0}


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
