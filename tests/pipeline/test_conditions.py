"""Tests of conditions and joins in pipeline files: their mistakes, and the routes of requests."""

from pathlib import Path

import pytest

from stagemesh.common.wire.tensors import to_messages
from stagemesh.orchestrator.request.validation import ValidRequest
from stagemesh.pipeline import Pipeline, conditions
from stagemesh.pipeline.conditions import Fact
from stagemesh.v1 import request_pb2
from tests.pipeline.files import edited, errors, good, load

BAND = good("conditions")


LOUD = "when: {option: loud, over: 5}"


def test_an_option_of_several_stages_is_within_the_bounds_of_all(tmp_path: Path) -> None:
    text = edited(BAND, "function: sing", "function: drawl", "audio: singer", "audio: singer.frames")
    speed = load(tmp_path, text).options["speed"]
    assert (speed.minimum, speed.maximum) == (0.6, 2.0)


def _taken(pipeline: Pipeline, *outputs: str, **options: float) -> set[str]:
    route = pipeline.route(outputs, {Fact("option", name): value for name, value in options.items()})
    return {edge.name for edge in route.edges}


def test_without_conditions_a_route_contains_what_its_outputs_need(tmp_path: Path) -> None:
    pipeline = load(tmp_path, BAND)
    assert _taken(pipeline, "text") == set()
    assert _taken(pipeline, "audio") == {"thinker->reader", "reader->singer"}
    assert _taken(pipeline, "text", "audio", "blend") == {edge.name for edge in pipeline.edges}


def test_an_option_or_its_default_disables_an_edge(tmp_path: Path) -> None:
    pipeline = load(tmp_path, edited(BAND, "reader, to: blender}", f"reader, to: blender, {LOUD}}}"))
    assert _taken(pipeline, "blend") == _taken(pipeline, "blend", loud=5) == {"thinker->blender"}
    assert _taken(pipeline, "blend", loud=5.1) == {"thinker->blender", "thinker->reader", "reader->blender"}


def test_a_stage_that_does_not_run_disables_its_edges(tmp_path: Path) -> None:
    pipeline = load(tmp_path, edited(BAND, "function: read", "function: read, when: {output: audio}"))
    route = pipeline.route(["blend"])
    assert [stage.name for stage in route.stages] == ["thinker", "blender"]
    assert route.absent(pipeline.stages["blender"]) == ("frames",)
    both = pipeline.route(["blend", "audio"])
    assert both.absent(pipeline.stages["blender"]) == ()
    assert both.outputs.keys() == {"blend", "audio"}


def test_edges_that_exclude_each_other_may_bring_the_same_tensor(tmp_path: Path) -> None:
    text = edited(BAND, "engine: plain, function: blend", "engine: lone")
    text = edited(text, "thinker, to: blender}", f"thinker, to: blender, {LOUD}}}")
    text = edited(text, "reader, to: blender}", "reader, to: blender, when: {option: loud, at_most: 5}}")
    pipeline = load(tmp_path, text)
    assert _taken(pipeline, "blend", loud=9) == {"thinker->blender"}
    assert _taken(pipeline, "blend") == {"thinker->reader", "reader->blender"}


def test_tokens_and_text_exclude_each_other(tmp_path: Path) -> None:
    again = "  - {from: thinker, to: blender, name: again, when: {input: tokens}}\n"
    text = edited(BAND, "thinker, to: blender}", "thinker, to: blender, when: {input: text}}")
    pipeline = load(tmp_path, edited(text, "outputs:", f"{again}outputs:"))
    route = pipeline.route(["blend"], {Fact("input", "tokens"): 1.0})
    assert [edge.name for edge in route.incoming["blender"]] == ["reader->blender", "again"]


@pytest.mark.parametrize(
    ("join", "apart"),
    [
        ("all", set()),
        ("any", {"thinker->blender", "reader->blender"}),
        ("[thinker]", {"reader->blender"}),
        ("[reader->blender]", {"thinker->blender"}),
    ],
)
def test_join_selects_the_edges_that_are_joined(tmp_path: Path, join: str, apart: set[str]) -> None:
    pipeline = load(tmp_path, edited(BAND, "function: blend", f"function: blend, join: {join}"))
    assert {edge.name for edge in pipeline.edges if edge.apart} == apart


def _joins(count: int, *, otherwise: str) -> str:
    """Returns a chain of stages, each fed by one of two producers: one above 5 of an option, the other `otherwise`."""
    options = "\n".join(f"  o{n}: {{default: 0, minimum: 0, maximum: 10}}" for n in range(count))
    stages, edges = ["  join0: {engine: plain, function: read}"], ["  - {from: thinker, to: join0}"]
    for n in range(count):
        stages += [f"  high{n}: {{engine: plain, function: blend, when: {{option: o{n}, over: 5}}}}"]
        stages += [f"  low{n}: {{engine: plain, function: blend, when: {{option: o{n}, {otherwise}}}}}"]
        stages += [f"  join{n + 1}: {{engine: plain, function: blend, join: any}}"]
        edges += [f"  - {{from: join{n}, to: {name}{n}}}" for name in ("high", "low")]
        edges += [f"  - {{from: {name}{n}, to: join{n + 1}}}" for name in ("high", "low")]
    head = ["pipeline: joins", "options:", options, "stages:", "  thinker: {engine: plain, function: talk}"]
    return "\n".join([*head, *stages, "edges:", *edges, f"outputs: {{frames: join{count}}}"])


@pytest.mark.timeout(20)
def test_many_joins_that_can_starve_are_found_quickly(tmp_path: Path) -> None:
    problems = errors(tmp_path, _joins(16, otherwise="under: 5"))
    assert len(problems) == 16
    for n, problem in enumerate(problems):
        assert f"no edge feeds stage 'join{n + 1}' when output frames is wanted and option o{n} is 5" in problem


@pytest.mark.timeout(20)
def test_many_joins_that_never_starve_are_accepted_quickly(tmp_path: Path) -> None:
    pipeline = load(tmp_path, _joins(16, otherwise="at_most: 5"))
    assert _taken(pipeline, "frames") >= {f"low{n}->join{n + 1}" for n in range(16)}


def test_conditions_with_too_many_cases_are_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conditions, "MAX_NODES", 6)
    text = edited(BAND, "to: singer}", f"to: singer, {LOUD}}}")
    assert errors(tmp_path, text) == [
        "3: the conditions (`when`) distinguish too many cases to check them; use fewer conditions"
    ]


def test_conditions_are_explained_as_written(tmp_path: Path) -> None:
    pipeline = load(tmp_path, edited(BAND, "reader, to: blender}", f"reader, to: blender, {LOUD}}}"))
    rows = {row.key: row.value for row in pipeline.explanation}
    assert rows["edges.3.when"] == '[{"option": "loud", "over": 5.0}]'
    assert "edges.0.when" not in rows


def test_the_facts_of_a_request_include_its_kinds_of_input() -> None:
    parts = [request_pb2.Part(text="what is"), request_pb2.Part(image=request_pb2.MediaFile(data=b"x"))]
    message = request_pb2.Message(role=request_pb2.ROLE_USER, parts=parts)
    given = request_pb2.Input(conversation=request_pb2.Conversation(messages=[message]))
    request = ValidRequest("r", given, request_pb2.Parameters(options=to_messages({"loud": 3.0})), ("text",))
    assert request.facts == {
        Fact("option", "loud"): 3.0,
        Fact("input", "text"): 1.0,
        Fact("input", "image"): 1.0,
        Fact("output", "text"): 1.0,
    }


def test_a_faulty_option_is_reported_once_at_its_own_line(tmp_path: Path) -> None:
    text = (
        "pipeline: fake\nstages:\n  a:\n    engine: fake\n    function: source\n    options:\n"
        "      steps: many\n  b:\n    engine: fake\n    options:\n      stepps: 2\n"
        "outputs: {a: a, b: b}\n"
    )
    assert errors(tmp_path, text, engines=None) == [
        (
            "7: option steps is 'many': Value error, it must be a number, or one of uniform, exponential, lognormal, "
            "one_of"
        ),
        ("8: stages a and b choose tokens; name the one that requests mean by default: add `main_stage: a`"),
        "11: engine 'fake' has no option 'stepps'; did you mean 'steps'?",
    ]
