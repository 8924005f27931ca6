"""`stagemesh pipeline validate`, which reports every mistake of a file at once."""

import json
from pathlib import Path
from typing import Any

import pytest

from stagemesh.common.errors import ExitCode
from tests.cli.commands import invoke
from tests.system.added_transforms import add_function

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
    (tmp_path / "wrong.yaml").write_text(WRONG)
    found = _findings(tmp_path / "wrong.yaml")
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
    (tmp_path / "wrong.yaml").write_text(WRONG)
    ran = invoke("pipeline", "validate", str(tmp_path / "wrong.yaml"))
    assert (ran.exit_code, len(ran.stderr.splitlines())) == (ExitCode.USAGE, 9)


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("pipeline: p\nstages: {a: [}\n", 2, "invalid YAML"),
        ("- pipeline\n", 1, "the file does not contain a mapping"),
    ],
)
def test_a_file_that_cannot_be_parsed_is_a_finding(tmp_path: Path, text: str, line: int, message: str) -> None:
    (tmp_path / "wrong.yaml").write_text(text)
    (finding,) = _findings(tmp_path / "wrong.yaml")
    assert (finding["line"], finding["place"]) == (line, f"{tmp_path / 'wrong.yaml'}:{line}")
    assert message in finding["message"]


def test_code_is_imported_unless_the_option_forbids_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    add_function(tmp_path, monkeypatch, name="talks", source=FUNCTION)
    file = tmp_path / "talks.yaml"
    file.write_text(PIPELINE)
    assert _findings(file, "--no-import") == []
    (finding,) = _findings(file)
    assert (finding["line"], finding["key"]) == (3, "stages.talks.function")
    assert "function 'talks': its factory 'added_talks:Talks' lacks the methods __call__" in finding["message"]


def test_an_unknown_class_of_a_model_is_reported(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    config = model / "config.json"
    config.write_text(json.dumps({"architectures": ["LamaForCausalLM"]}))
    file = tmp_path / "talks.yaml"
    file.write_text(f"pipeline: talks\nstages:\n  talks: {{engine: vllm, model: {model}}}\noutputs: {{text: talks}}\n")
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
        ('{"_class_name": "SoraPipeline"}', "does not support SoraPipeline"),
        ('{"_class_name": "FluxPipeline"}', ""),
    ],
)
def test_a_pipeline_that_diffusion_does_not_support_is_reported(
    tmp_path: Path, index: str | None, message: str
) -> None:
    if index is not None:
        (tmp_path / "model_index.json").write_text(index)
    file = tmp_path / "draws.yaml"
    file.write_text(
        f"pipeline: p\nstages: {{draw: {{engine: diffusion, model: {tmp_path}}}}}\noutputs: {{image: draw}}\n"
    )
    found = _findings(file)
    assert [finding["key"] for finding in found] == (["stages.draw.model"] if message else [])
    assert all(message in finding["message"] for finding in found)


def test_a_valid_file_has_a_generation(tmp_path: Path) -> None:
    ran = invoke("pipeline", "validate", "speech", "--json", "--no-models")
    document = json.loads(ran.stdout)
    assert (document["findings"], document["pipeline"]) == ([], "speech")
    assert f"generation {document['generation']}" in invoke("pipeline", "validate", "speech", "--no-models").stdout
