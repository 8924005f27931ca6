import json
from pathlib import Path

from stagemesh.common.errors import ExitCode
from tests.cli.commands import Ran, invoke


def _run(*arguments: str) -> Ran:
    return invoke("pipeline", *arguments)


def test_a_valid_pipeline_is_reported_as_valid(tiny: Path) -> None:
    ran = _run("validate", str(tiny))
    assert (ran.exit_code, "tiny is valid (2 stages, 1 edge, 1 output)" in ran.stdout) == (0, True)


def test_a_mistake_is_shown_with_file_and_line(tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace("to: second", "to: third"))
    ran = _run("validate", str(tiny))
    assert ran.exit_code == ExitCode.USAGE
    assert f"{tiny}:6: unknown stage" in ran.stderr
    assert "Traceback" not in ran.stderr


def test_an_error_can_be_printed_as_json() -> None:
    ran = _run("validate", "spech", "--json")
    error = json.loads(ran.stderr)["error"]
    assert (ran.exit_code, error["code"], error["reason"]) == (ExitCode.NOT_FOUND, "NOT_FOUND", "UNKNOWN_PIPELINE")


def test_explain_shows_the_origin_of_values(tiny: Path) -> None:
    ran = _run("explain", str(tiny), "--set", "stages.first.options.steps=9", "--json")
    rows = {row["key"]: row for row in json.loads(ran.stdout)}
    assert (rows["stages.first.options.steps"]["value"], rows["stages.first.options.steps"]["origin"]) == (
        "9",
        "override",
    )


def test_replicas_are_set_by_stage(tiny: Path) -> None:
    ran = _run("explain", str(tiny), "--replicas", "second=3", "--json")
    assert {row["key"]: row["value"] for row in json.loads(ran.stdout)}["stages.second.replicas"] == "3"


def test_a_text_that_is_not_a_pair_is_a_usage_error(tiny: Path) -> None:
    assert _run("explain", str(tiny), "--set", "steps").exit_code == 2
    assert _run("explain", str(tiny), "--replicas", "first=many").exit_code == 2


def test_the_tree_shows_stages_edges_and_outputs(tiny: Path) -> None:
    ran = _run("graph", str(tiny))
    assert all(part in ran.stdout for part in ("first", "<- prompt", "-> second", "auto", "=> text"))


def test_the_graph_can_be_printed_as_json(tiny: Path) -> None:
    document = json.loads(_run("graph", str(tiny), "--json").stdout)
    assert document == {
        "pipeline": "tiny",
        "stages": ["first", "second"],
        "edges": [{"from": "first", "to": "second"}],
        "outputs": {"text": "second"},
    }


def test_the_mermaid_chart_has_every_arrow(tiny: Path) -> None:
    lines = _run("graph", str(tiny), "--format", "mermaid").stdout.splitlines()
    assert lines[0] == "flowchart LR"
    assert sum("-->" in line for line in lines) == 3


def test_the_dot_graph_has_every_arrow(tiny: Path) -> None:
    dot = _run("graph", str(tiny), "--format", "dot").stdout
    assert dot.startswith('digraph "tiny" {')
    assert dot.count("->") == 3
