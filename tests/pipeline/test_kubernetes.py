"""The rules of the Helm chart, and pipeline files within values files of the chart."""

from functools import partial
from pathlib import Path

import pytest

from stagemesh.pipeline import kubernetes_hints
from tests.pipeline.files import errors, good, load

load_chart = partial(load, for_kubernetes=True)
chart_errors = partial(errors, for_kubernetes=True)

GOOD = good("chart")
VALUES = f"""\
images:
  stage: {{repository: "${{REGISTRY}}/stage"}}
pipeline:
{"".join(f"  {line}" for line in GOOD.splitlines(keepends=True))}
stages: {{thinker: {{gpus: 1}}}}
"""
LONG = "a-name-with-thirty-one-letters-"


@pytest.mark.parametrize("key", ["engine", "replicas", "group"])
def test_a_variable_is_rejected_if_the_chart_reads_the_value(key: str, tmp_path: Path) -> None:
    text = GOOD.replace("{engine: plain, function: talk}", f"{{engine: plain, function: talk, {key}: '${{X:-y}}'}}")
    assert any(f"stages.thinker.{key} is ${{X:-y}}, but the chart" in line for line in chart_errors(tmp_path, text))


@pytest.mark.parametrize("end", ["from: thinker", "to: reader"])
def test_a_variable_cannot_name_the_end_of_an_edge(end: str, tmp_path: Path) -> None:
    key, name = end.split(": ")
    text = GOOD.replace(f"{end}", f"{key}: ${{X:-{name}}}")
    assert f"edges.0.{key} is ${{X:-{name}}}, but the chart" in chart_errors(tmp_path, text)[0]


def test_all_mistakes_are_reported_together(tmp_path: Path) -> None:
    text = GOOD.replace("thinker", "admin").replace("singer", "loud-warm").replace("sing, group: voice", "sing")
    assert [line.split(": ")[0] for line in chart_errors(tmp_path, text)] == ["3", "5", "8"]


def test_variables_may_be_used_in_other_places(tmp_path: Path) -> None:
    text = GOOD.replace("function: talk", "function: '${F:-talk}', options: {max_len: '${N:-3}'}")
    assert load_chart(tmp_path, text).stages["thinker"].function == "talk"


def test_an_override_replaces_a_variable(tmp_path: Path) -> None:
    text = GOOD.replace("function: talk", "function: talk, replicas: '${N:-3}'")
    assert load_chart(tmp_path, text, overrides={"stages.thinker.replicas": "4"}).stages["thinker"].replicas == 4


def test_a_name_may_have_thirty_characters(tmp_path: Path) -> None:
    name = f"{LONG[:-2]}x"
    assert len(name) == 30
    assert name in load_chart(tmp_path, GOOD.replace("thinker", name)).stages


def test_a_group_may_have_the_name_of_its_stage(tmp_path: Path) -> None:
    stages = load_chart(tmp_path, GOOD.replace("voice", "singer")).stages
    groups = {name: stage.group_name for name, stage in stages.items()}
    assert groups == {"thinker": "thinker", "reader": "singer", "singer": "singer"}


def test_groups_do_not_change_the_generation(tmp_path: Path) -> None:
    apart = load_chart(tmp_path, GOOD.replace(", group: voice", "").replace("shm", "auto"))
    assert apart.generation == load_chart(tmp_path, GOOD).generation


def test_the_rules_of_the_chart_are_not_checked_otherwise(tmp_path: Path) -> None:
    text = GOOD.replace("thinker", "admin").replace(", group: voice", "")
    assert "admin" in load(tmp_path, text).stages


def test_a_values_file_contains_a_pipeline(tmp_path: Path) -> None:
    pipeline = load(tmp_path, VALUES)
    assert (pipeline.name, list(pipeline.stages)) == ("song", ["thinker", "reader", "singer"])


def test_a_mistake_has_its_line_in_the_values_file(tmp_path: Path) -> None:
    text = VALUES.replace("sing, group: voice", "sing").replace("audio: singer", "audio: singr")
    edge, output = chart_errors(tmp_path, text)
    assert edge.startswith("11: edge 'reader->singer' uses shm, but its stages do not share a pod; give both")
    assert output == "12: output 'audio' names an unknown stage 'singr'; did you mean 'singer'?"


def test_an_incomplete_values_file_names_the_line_of_the_pipeline(tmp_path: Path) -> None:
    lines = chart_errors(tmp_path, "images: {}\npipeline: {}\n")
    assert lines == [
        "2: the file has no 'pipeline'; add it",
        "2: the file has no 'stages'; add it",
        "2: the file has no 'outputs'; add it",
    ]


def test_the_content_has_references_instead_of_values(tmp_path: Path) -> None:
    text = GOOD.replace("function: talk", "function: ${F}, options: {max_len: ${N:-3}, device: '$${D} ${D:-}'}")
    overrides = {"stages.reader.options": "{device: '${X}'}"}
    stages = load_chart(tmp_path, text, variables={"F": "talk"}, overrides=overrides).content["stages"]
    assert isinstance(stages, dict)
    assert stages["thinker"]["function"] == "${F}"
    assert stages["thinker"]["options"] == {"max_len": "${N:-3}", "device": "$${D} ${D:-}"}
    assert stages["reader"]["options"] == {"device": "$${X}"}
    assert stages["reader"]["group"] == "voice"


EXTERNAL = """\
pipeline: song
stages:
  thinker: {engine: plain, function: talk}
  upper:
    engine: external
    signature: {accepts: {text: "uint8[bytes]"}, emits: {text: {type: "uint8[bytes]", kind: text}}}
edges:
  - {from: thinker, to: upper}
outputs: {text: upper}
"""


def test_an_external_stage_without_addresses_is_a_hint(tmp_path: Path) -> None:
    (hint,) = kubernetes_hints(load_chart(tmp_path, EXTERNAL))
    assert hint.startswith("stage 'upper' is external and has no addresses; set stages.upper.external.service and ")
    text = EXTERNAL.replace("engine: external", "engine: external\n    addresses: ['upper.other:50051']")
    assert kubernetes_hints(load_chart(tmp_path, text)) == ()


def test_an_external_stage_shares_no_pod(tmp_path: Path) -> None:
    (error,) = chart_errors(tmp_path, EXTERNAL.replace("to: upper}", "to: upper, connector: shm}"))
    assert error.endswith("set `connector: auto`, because an external stage is in another pod")


def test_a_folder_for_media_is_a_hint(tmp_path: Path) -> None:
    hint = kubernetes_hints(load_chart(tmp_path, f"{GOOD}media: {{store: /srv/media}}\n"))[0]
    assert "media.store is the folder /srv/media, which is a different folder in each pod" in hint
    assert kubernetes_hints(load_chart(tmp_path, f"{GOOD}media: {{store: 'memory://media'}}\n")) == ()
