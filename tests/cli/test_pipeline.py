"""`stagemesh pipeline` and `stagemesh k8s`: pipeline files are checked, explained, drawn and rendered."""

import itertools
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml

from stagemesh.common.errors import ExitCode
from tests.cli.commands import Ran, invoke
from tests.k8s.manifests import field
from tests.system.added_transforms import add_function
from tests.system.pipelines import pipeline_file


def test_a_valid_pipeline_is_reported_as_valid(tiny: Path) -> None:
    ran = invoke("pipeline", "validate", str(tiny))
    assert (ran.exit_code, "tiny is valid (2 stages, 1 edge, 1 output)" in ran.stdout) == (0, True)


def test_a_mistake_is_shown_with_file_and_line(tiny: Path) -> None:
    tiny.write_text(tiny.read_text().replace("to: second", "to: third"))
    ran = invoke("pipeline", "validate", str(tiny))
    ran.check(ExitCode.USAGE, f"{tiny}:6: unknown stage")
    assert "Traceback" not in ran.stderr


def test_an_error_can_be_printed_as_json() -> None:
    ran = invoke("pipeline", "validate", "spech", "--json")
    error = json.loads(ran.stderr)["error"]
    assert (ran.exit_code, error["code"], error["reason"]) == (ExitCode.NOT_FOUND, "NOT_FOUND", "UNKNOWN_PIPELINE")


def test_explain_shows_the_origin_of_values(tiny: Path) -> None:
    ran = invoke("pipeline", "explain", str(tiny), "--set", "stages.first.options.steps=9", "--json")
    (row,) = (row for row in json.loads(ran.stdout) if row["key"] == "stages.first.options.steps")
    assert (row["value"], row["origin"]) == ("9", "override")


def test_replicas_are_set_by_stage(tiny: Path) -> None:
    ran = invoke("pipeline", "explain", str(tiny), "--replicas", "second=3", "--json")
    assert {row["key"]: row["value"] for row in json.loads(ran.stdout)}["stages.second.replicas"] == "3"


def test_a_text_that_is_not_a_pair_is_a_usage_error(tiny: Path) -> None:
    assert invoke("pipeline", "explain", str(tiny), "--set", "steps").exit_code == 2
    assert invoke("pipeline", "explain", str(tiny), "--replicas", "first=many").exit_code == 2


def test_the_tree_shows_stages_edges_and_outputs(tiny: Path) -> None:
    ran = invoke("pipeline", "graph", str(tiny))
    assert all(part in ran.stdout for part in ("first", "<- prompt", "-> second", "auto", "=> text"))


def test_the_graph_can_be_printed_as_json(tiny: Path) -> None:
    assert json.loads(invoke("pipeline", "graph", str(tiny), "--json").stdout) == {
        "pipeline": "tiny",
        "stages": ["first", "second"],
        "edges": [{"from": "first", "to": "second"}],
        "outputs": {"text": "second"},
    }


@pytest.mark.parametrize(
    ("chart", "start", "arrow"), [("mermaid", "flowchart LR\n", "-->"), ("dot", 'digraph "tiny" {', "->")]
)
def test_a_chart_has_every_arrow(tiny: Path, chart: str, start: str, arrow: str) -> None:
    printed = invoke("pipeline", "graph", str(tiny), "--format", chart).stdout
    assert printed.startswith(start)
    assert printed.count(arrow) == 3


WRONG = """\
pipeline: wrong
stages:
  thinker:
    engine: fake
    replicas: 0
    optins:
      steps: many
      stepss: 3
  acoustic:
    engine: function
    function: hibari.acoustic
    options: {max_batch: none, pitch: 2}
  voice: {engine: function, function: hibari.vocodr}
edges:
  - {from: thinker, to: acoustic, transform: text.sentence}
  - {from: acoustic, to: voice}
outputs: {audio: voice, text: thinkr}
"""
FUNCTION = """\
from stagemesh.common.plugins.descriptors import Emitted, FunctionDescriptor, Signature
from stagemesh.common.wire.tensors import TensorSpec

_TEXT = Emitted(TensorSpec.parse("uint8[bytes]"), kind="text")
DESCRIPTOR = FunctionDescriptor(Signature(emits={"text": _TEXT}), "added_talks:Talks")


class Talks:
    def open(self, *, seed, options): ...
"""
PIPELINE = "pipeline: talks\nstages:\n  talks: {engine: function, function: talks}\noutputs: {text: talks}\n"


def _findings(file: Path, *arguments: str) -> list[dict[str, Any]]:
    ran = invoke("pipeline", "validate", str(file), "--json", *arguments)
    found: list[dict[str, Any]] = json.loads(ran.stdout)["findings"]
    assert ran.exit_code == (ExitCode.USAGE if found else 0)
    return found


def test_mistakes_of_all_kinds_are_reported_at_once(tmp_path: Path) -> None:
    found = _findings(pipeline_file(tmp_path, WRONG, name="wrong"))
    assert [(each["line"], each["key"]) for each in found] == [
        (5, "stages.thinker.replicas"),
        (6, "stages.thinker.optins"),
        (7, "stages.thinker.options.steps"),
        (8, "stages.thinker.options.stepss"),
        (12, "stages.acoustic.options.max_batch"),
        (12, "stages.acoustic.options.pitch"),
        (13, "stages.voice.function"),
        (15, "edges.0.transform"),
        (17, "outputs.text"),
    ]
    assert found[1]["message"] == "unknown key 'stages.thinker.optins'; did you mean 'options'?"
    assert found[1]["place"] == f"{tmp_path / 'wrong.yaml'}:6"


def test_mistakes_are_reported_as_text(tmp_path: Path) -> None:
    ran = invoke("pipeline", "validate", str(pipeline_file(tmp_path, WRONG)))
    assert (ran.exit_code, len(ran.stderr.splitlines())) == (ExitCode.USAGE, 9)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [("pipeline: p\nstages: {a: [}\n", 2, "invalid YAML"), ("- pipeline\n", 1, "the file does not contain a mapping")],
)
def test_a_file_that_cannot_be_parsed_is_a_finding(tmp_path: Path, text: str, line: int, message: str) -> None:
    (finding,) = _findings(pipeline_file(tmp_path, text, name="wrong"))
    assert (finding["line"], finding["place"]) == (line, f"{tmp_path / 'wrong.yaml'}:{line}")
    assert message in finding["message"]


def test_code_is_imported_unless_the_option_forbids_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_function(tmp_path, monkeypatch, name="talks", source=FUNCTION)
    file = pipeline_file(tmp_path, PIPELINE)
    assert _findings(file, "--no-import") == []
    (finding,) = _findings(file)
    assert (finding["line"], finding["key"]) == (3, "stages.talks.function")
    assert "function 'talks': its factory 'added_talks:Talks' lacks the methods __call__" in finding["message"]


def test_an_unknown_class_of_a_model_is_reported(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = model / "config.json"
    config.write_text(json.dumps({"architectures": ["LamaForCausalLM"]}))
    text = f"pipeline: talks\nstages:\n  talks: {{engine: vllm, model: {model}}}\noutputs: {{text: talks}}\n"
    file = pipeline_file(tmp_path, text)
    (finding,) = _findings(file)
    assert (finding["line"], finding["key"]) == (3, "stages.talks.model")
    assert "vLLM knows no model class 'LamaForCausalLM'" in finding["message"]
    assert "LlamaForCausalLM" in finding["message"]
    # vLLM names it only as a class that earlier versions ran.
    config.write_text(json.dumps({"architectures": ["Phi3SmallForCausalLM"]}))
    assert len(_findings(file)) == 1
    config.write_text(json.dumps({"architectures": ["LlamaForCausalLM"]}))
    assert _findings(file) == []


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (None, "cannot be read: No such file or directory"),
        ("{}", "names no pipeline class"),
        ('{"_class_name": "SoraPipeline"}', "has no class SoraPipeline"),
        ('{"_class_name": "FluxPipeline"}', ""),
    ],
)
def test_a_pipeline_unknown_to_diffusion_is_reported(tmp_path: Path, index: str | None, message: str) -> None:
    if index is not None:
        (tmp_path / "model_index.json").write_text(index)
    text = f"pipeline: p\nstages: {{draw: {{engine: diffusion, model: {tmp_path}}}}}\noutputs: {{image: draw}}\n"
    found = _findings(pipeline_file(tmp_path, text))
    assert [finding["key"] for finding in found] == (["stages.draw.model"] if message else [])
    assert all(message in finding["message"] for finding in found)


def test_a_valid_file_has_a_generation(tmp_path: Path) -> None:
    document = json.loads(invoke("pipeline", "validate", "speech", "--json", "--no-models").stdout)
    assert (document["findings"], document["pipeline"]) == ([], "speech")
    assert f"generation {document['generation']}" in invoke("pipeline", "validate", "speech", "--no-models").stdout


ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
RENDERED = yaml.safe_load(Path(__file__).with_name("rendered_values.yaml").read_text())
CHART_EXAMPLES = sorted((ROOT / "k8s" / "chart" / "ci").glob("*-values.yaml"))
MODELS = """\
pipeline: song
stages:
  thinker: {engine: vllm, model: m/think, replicas: 2, options: {tensor_parallel_size: 2, pipeline_parallel_size: 2}}
  acoustic: {engine: function, function: hibari.acoustic, model: hibari}
  vocoder: {engine: function, function: hibari.vocoder}
edges:
  - {from: thinker, to: acoustic, transform: text.sentences}
  - {from: acoustic, to: vocoder}
outputs: {text: thinker, audio: vocoder}
"""


@pytest.fixture
def song(tmp_path: Path) -> Path:
    return pipeline_file(tmp_path, MODELS, name="song")


def _render(*arguments: str) -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load(invoke("k8s", "render", *arguments).output)
    return values


def _validate(path: Path, *arguments: str) -> Ran:
    return invoke("pipeline", "validate", "--kubernetes", str(path), *arguments)


@pytest.mark.parametrize("name", ["speech", "digits", "rehearsal", "external"])
def test_the_values_of_a_pipeline_are_valid(name: str, tmp_path: Path) -> None:
    source = name if name == "speech" else str(EXAMPLES / name / "pipeline.yaml")
    path = tmp_path / "values.yaml"
    path.write_text(invoke("k8s", "render", source).stdout)
    rendered, original = _validate(path, "--json"), invoke("pipeline", "validate", source, "--no-models", "--json")
    assert json.loads(rendered.output)["generation"] == json.loads(original.stdout)["generation"]


def test_json_and_yaml_contain_the_same_values(song: Path) -> None:
    assert json.loads(invoke("k8s", "render", str(song), "--json").stdout) == _render(str(song))


def test_the_pipeline_is_that_of_the_file(song: Path) -> None:
    assert _render(str(song))["pipeline"] == yaml.safe_load(MODELS)


@pytest.mark.parametrize("name", RENDERED)
def test_options_of_a_pipeline_become_values(name: str, song: Path) -> None:
    case = RENDERED[name]
    options = [(f"--{option}", each) for option in ("set", "replicas") for each in case.get(option, [])]
    values = _render(str(song), *itertools.chain(*options))
    assert {path: field(values, path) for path in case["values"]} == case["values"]


def test_variables_remain_variables() -> None:
    ran = invoke("k8s", "render", str(EXAMPLES / "rehearsal" / "pipeline.yaml"))
    assert "probability: ${FAULTS:-0}\n" in ran.stdout
    assert "# The pipeline reads variables: FAULTS. Set them by `env`" in ran.stdout


OTHER_TYPES = ("y", "N", "on", "Off", "null", "~", "1.10", "1e5", "0x1f", "0o17", "1_000", "1:30", "_1")
QUOTED = {f"tokenizer_mode='{text}'": f'tokenizer_mode: "{text}"' for text in OTHER_TYPES}


@pytest.mark.parametrize(("option", "line"), [*QUOTED.items(), ("mm_processor_kwargs={'y': 1}", '"y": 1')])
def test_text_that_looks_like_another_type_is_quoted(option: str, line: str, song: Path) -> None:
    assert f"{line}\n" in invoke("k8s", "render", str(song), "--set", f"stages.thinker.options.{option}").stdout


@pytest.mark.parametrize(
    ("options", "gpus"), [("{}", 1), ("{device: cpu}", 0), ("{parallel: {cfg: 2, ulysses: 4, hsdp: 2}}", 8)]
)
def test_the_number_of_gpus_of_a_diffusion_stage(options: str, gpus: int, tmp_path: Path) -> None:
    all_stage = f"all: {{engine: diffusion, model: m, options: {options}}}"
    path = pipeline_file(tmp_path, f"pipeline: image\nstages: {{{all_stage}}}\noutputs: {{image: all}}\n")
    stage = _render(str(path))["stages"]["all"]
    assert (stage.get("gpus", 0), "image" in stage) == (gpus, gpus > 0)


def test_images_are_named_by_repository_and_tag(song: Path) -> None:
    values = _render(str(song))
    tag = version("stagemesh")
    images = {name: (image["repository"].split("/")[-1], image["tag"]) for name, image in values["images"].items()}
    assert images == {"orchestrator": ("orchestrator", tag), "stage": ("stage-cpu", tag)}
    assert values["stages"]["thinker"]["image"]["repository"].endswith("/stage-cuda")


def test_every_value_that_depends_on_the_cluster_is_marked(song: Path) -> None:
    lines = invoke("k8s", "render", str(song), "--set", "edges.*.connector=nixl").stdout.splitlines()
    keys = ("repository:", "tag:", "gpus:", "image:", "resources:", "rdma:", "modelCache:")
    found = [(before, line) for before, line in itertools.pairwise(lines) if line.strip().startswith(keys)]
    assert {line.split()[0] for _, line in found} == set(keys)
    assert [line for before, line in found if not before.strip().startswith("# CHANGE: ")] == []


def test_an_external_stage_without_addresses_refers_to_a_service() -> None:
    source = str(EXAMPLES / "external" / "pipeline.yaml")
    assert "upper" not in _render(source)["stages"]
    ran = invoke("k8s", "render", source, "--set", "stages.upper.addresses=[]")
    assert yaml.safe_load(ran.stdout)["stages"]["upper"] == {"external": {"service": "upper", "port": 50051}}
    assert "# Note: stage 'upper' is external and has no addresses; set stages.upper.external.service and" in ran.stdout


def test_a_pipeline_that_breaks_a_rule_of_the_chart_is_rejected() -> None:
    path = EXAMPLES / "graph" / "pipeline.yaml"
    ran = invoke("k8s", "render", str(path))
    assert (ran.exit_code, ran.stdout) == (ExitCode.USAGE, "")
    assert f"{path}:18: edge 'writer->words' uses shm, but its stages do not share a pod" in ran.stderr
    assert invoke("pipeline", "validate", str(path)).exit_code == 0
    assert _validate(path).exit_code == ExitCode.USAGE


@pytest.mark.parametrize("path", CHART_EXAMPLES, ids=lambda path: path.stem)
def test_only_later_functions_are_missing_in_the_examples_of_the_chart(path: Path) -> None:
    later = ("unknown function 'qwen3_", "unknown transform 'qwen3_", "stage 'talker' emits have no common first axis")
    assert [line for line in _validate(path).stderr.splitlines() if not any(text in line for text in later)] == []


def test_models_are_not_looked_up_for_kubernetes(song: Path) -> None:
    assert _validate(song).exit_code == 0
    assert "model 'm/think' is missing" in _validate(song, "--models").stderr
    assert invoke("pipeline", "validate", str(song)).exit_code == ExitCode.USAGE


def test_hints_are_printed_as_notes_and_as_json(tiny: Path) -> None:
    tiny.write_text(f"{tiny.read_text()}media: {{store: /srv/media}}\n")
    assert "\n  note: media.store is the folder /srv/media" in _validate(tiny).stdout
    (hint,) = json.loads(_validate(tiny, "--json").stdout)["hints"]
    assert hint.startswith("media.store is the folder")
    assert "note:" not in invoke("pipeline", "validate", str(tiny)).stdout


def test_the_graph_shows_groups(tiny: Path) -> None:
    ran = invoke("pipeline", "graph", str(tiny), "--set", "stages.second.group=voice")
    assert "second  fake, relay, group voice" in ran.stdout
