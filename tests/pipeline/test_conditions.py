"""Tests of conditions and joins in pipeline files: their mistakes, and the routes of requests."""

from pathlib import Path

import pytest

from stagemesh.common.wire.tensors import to_messages
from stagemesh.orchestrator.request.validation import ValidRequest
from stagemesh.pipeline import Pipeline, conditions
from stagemesh.pipeline.conditions import Fact
from stagemesh.v1 import request_pb2
from tests.pipeline.files import edited, errors, load, mistakes

BAND = """\
pipeline: band
options: {loud: {default: 0, minimum: 0, maximum: 10}}
stages:
  thinker: {engine: plain, function: talk}
  reader: {engine: plain, function: read}
  singer: {engine: plain, function: sing}
  blender: {engine: plain, function: blend}
edges:
  - {from: thinker, to: reader}
  - {from: reader, to: singer}
  - {from: thinker, to: blender}
  - {from: reader, to: blender}
outputs: {text: thinker, audio: singer, blend: blender}
"""


LOUD = "when: {option: loud, over: 5}"


@mistakes(BAND, {
    "unknown option": ("to: singer}", "to: singer, when: {option: lout, is: 1}}",
        "10: no stage has an option 'lout', and `options` does not declare it; did you mean 'loud'?"),
    "option of another type": ("to: singer}", "to: singer, when: {option: loud, is: high}}",
        "10: edges.1.when.0.is is 'high'; input should be a valid number"),
    "option that is no truth value": ("to: singer}", "to: singer, when: {option: loud, is: true}}",
        "10: edges.1.when.0.is is True; input should be a valid number"),
    "option as a flag": ("to: singer}", "to: singer, when: {option: loud, wanted: true}}",
        "10: unknown key 'edges.1.when.0.wanted'; known: at_least, at_most, is, is_not, option, over, under"),
    "option compared with nothing": ("to: singer}", "to: singer, when: {option: loud}}",
        "10: option 'loud' is not compared with anything; add one of is, is_not, over, at_least, under, at_most"),
    "never so": ("to: singer}", "to: singer, when: {option: loud, over: 10}}",
        "10: option loud is over 10: this never holds (the option is between 0 and 10); compare it with another value"),
    "always so": ("to: singer}", "to: singer, when: {option: loud, at_least: 0}}",
        ("10: option loud is at least 0: this always holds (the option is between 0 and 10); remove it, or compare "
         "it with another value")),
    "contradiction": ("to: singer}", "to: singer, when: {option: loud, over: 5, under: 5}}",
        "10: option loud is over 5 and option loud is under 5: no request can fulfil this; remove a term"),
    "tokens and text": ("to: singer}", "to: singer, when: [{input: tokens}, {input: text}]}",
        "10: the input has tokens and the input has text: no request can fulfil this; remove a term"),
    "unknown comparison": ("to: singer}", "to: singer, when: {option: loud, above: 5}}",
        "10: unknown key 'edges.1.when.0.above'; did you mean 'over'?"),
    "nothing named": ("to: singer}", "to: singer, when: {is: 5}}",
        "10: edges.1.when.0 is {'is': 5}; name exactly one of option, input, output, and use a list for more"),
    "two named": ("to: singer}", "to: singer, when: {option: loud, output: text, over: 3}}",
        ("10: edges.1.when.0 is {'option': 'loud', 'output': 'text', 'over': 3}; name exactly one of option, input, "
         "output, and use a list for more")),
    "unknown input": ("to: singer}", "to: singer, when: {input: smell}}",
        ("10: edges.1.when.0.input is 'smell'; input should be 'text', 'tokens', 'image', 'audio', 'video', "
         "'tensors' or 'stream'")),
    "input that no stage takes": ("to: singer}", "to: singer, when: {input: image}}",
        "10: no stage accepts image, and requests with it are rejected; remove the condition"),
    "input that is wanted": ("to: singer}", "to: singer, when: {input: text, wanted: true}}",
        "10: unknown key 'edges.1.when.0.wanted'; known: given, input"),
    "output that is given": ("to: singer}", "to: singer, when: {output: text, given: true}}",
        "10: unknown key 'edges.1.when.0.given'; known: output, wanted"),
    "unknown output": ("to: singer}", "to: singer, when: {output: sound}}",
        "10: unknown output 'sound'; known: audio, blend, text"),
    "option of several defaults": ("function: sing", "function: drawl", "audio: singer", "audio: singer.frames",
        "to: singer}", "to: singer, when: {option: speed, over: 1}}",
        ("10: stages singer and blender have option 'speed' with different defaults; declare another one under "
         "`options`")),
    "output compared as a number": ("to: singer}", "to: singer, when: {output: text, is: 1}}",
        "10: unknown key 'edges.1.when.0.is'; known: output, wanted"),
    "empty when": ("to: singer}", "to: singer, when: []}", "10: edges.1.when is empty; add at least one item"),
    "option of a stage declared again": ("options: {loud:", "options: {speed:",
        "2: stage 'blender' has option 'speed' already; choose another name"),
    "option with bounds that do not hold": ("default: 0, min", "default: 11, min",
        ("2: options.loud is {'default': 11, 'minimum': 0, 'maximum': 10}; minimum must be less than maximum, and "
         "default must be between them")),
    "output that is not always made": ("function: sing", "function: sing, when: {option: loud, over: 5}",
        ("13: output 'audio' is not made when output audio is wanted and option loud is 0: stage 'singer' runs only "
         "when option loud is over 5; use `when: {output: audio}` there, or conditions on its edges")),
    "stage that can starve": ("to: singer}", "to: singer, when: {option: loud, over: 5}}",
        ("6: no edge feeds stage 'singer' when output audio is wanted and option loud is 0; give the stage a "
         "`when`, or let an edge feed it in this case")),
    "join that can starve": ("thinker, to: blender}", "thinker, to: blender, when: {option: loud, over: 5}}",
        "reader, to: blender}", "reader, to: blender, when: {option: loud, at_least: 7}}",
        ("7: no edge feeds stage 'blender' when output blend is wanted and option loud is 0; give the stage a "
         "`when`, or let an edge feed it in this case")),
    "join that lacks a tensor": ("function: blend", "function: mix",
        "reader, to: blender}", "reader, to: blender, when: {option: loud, over: 5}}",
        ("7: no edge brings stage 'blender' its 'frames' when output blend is wanted and option loud is 0; give the "
         "stage the same condition, or let another edge bring it in this case")),
    "edge that never carries anything": ("function: read", "function: read, when: {output: audio}",
        "reader, to: blender}", "reader, to: blender, when: {output: audio, wanted: false}}",
        "12: edge 'reader->blender' never carries anything: its condition contradicts those of its stages; change one"),
    "stage that never runs": ("function: sing", "function: sing, when: {output: audio}",
        "audio: singer, ", "audio: thinker.token_ids, ", "outputs: {", "outputs: {last: singer, ",
        "function: read", "function: read, when: {output: last, wanted: false}",
        "  - {from: reader, to: blender}\n", "",
        ("5: stage 'reader' never runs: its conditions and those of the edges towards the outputs contradict each "
         "other; change one")),
    "tensor that comes twice": ("  - {from: reader, to: blender}", "  - {from: thinker, to: blender, name: again}",
        ("12: edges 'thinker->blender' and 'again' both bring stage 'blender' its text; give it `join: any`, rename "
         "one by a transform, or give them conditions that exclude each other")),
    "part of an input apart": ("function: blend", "function: mix, join: any",
        ("7: stage 'blender' does not join edge 'thinker->blender' with others (`join`), but requires 'frames' with "
         "it; join these edges, or bring 'frames' over this edge")),
    "several edges to an engine that takes one": ("engine: plain, function: blend", "engine: lone",
        ("12: engine 'lone' accepts only one edge, but edges 'thinker->blender' and 'reader->blender' both lead to "
         "stage 'blender'; join them in a function stage before it")),
    "join of an edge that is not there": ("function: blend", "function: blend, join: [thinker, singer]",
        "7: no edge to stage 'blender' has the name or the producer 'singer'; did you mean 'thinker'?"),
    "unknown join": ("function: blend", "function: blend, join: some",
        "7: stages.blender.join is 'some'; input should be 'all' or 'any'"),
})  # fmt: skip
def test_a_mistake_is_reported_with_its_line_and_remedy(tmp_path: Path, text: str, error: str) -> None:
    assert error in errors(tmp_path, text)


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
    assert errors(tmp_path, text, catalog=None) == [
        (
            "7: option steps is 'many': Value error, it must be a number, or one of uniform, exponential, lognormal, "
            "one_of"
        ),
        ("8: stages a and b choose tokens; name the one that requests mean by default: add `main_stage: a`"),
        "11: engine 'fake' has no option 'stepps'; did you mean 'steps'?",
    ]
