"""`stagemesh pipeline import`. The configs in the folder vllm_omni use the keys that vLLM-Omni documents."""

import json
from pathlib import Path

import pytest
import yaml

from stagemesh.common.errors import ExitCode
from stagemesh.vllm_omni.keys import VLLM_ARGUMENTS
from tests.cli.commands import Ran, invoke

CONFIGS = Path(__file__).parent / "vllm_omni"
IMPORTED = CONFIGS / "imported"
"""For each config, the pipeline that it becomes, and the paths of the keys that are not carried over or not needed."""


def _import(path: Path, *arguments: str) -> Ran:
    return invoke("pipeline", "import", str(path), *arguments)


def _missing(name: str, *arguments: str) -> list[str]:
    """Returns the paths of the keys that prevent a pipeline."""
    ran = _import(CONFIGS / f"{name}.yaml", "--json", *arguments)
    document = json.loads(ran.stdout)
    assert (ran.exit_code, document["pipeline"], document["file"]) == (ExitCode.FAILED, None, "")
    return [item["path"] for item in document["missing"]]


def _changed(folder: Path, name: str, before: str, after: str) -> Path:
    """Writes a config with another text in one place, and returns its path."""
    path = folder / "config.yaml"
    path.write_text((CONFIGS / f"{name}.yaml").read_text().replace(before, after))
    return path


def _refuse(folder: Path, text: str) -> str:
    (folder / "config.yaml").write_text(text)
    ran = _import(folder / "config.yaml")
    assert (ran.exit_code, ran.stdout, "Traceback" in ran.stderr) == (ExitCode.USAGE, "", False)
    return ran.stderr


@pytest.mark.parametrize("name", sorted(path.stem for path in IMPORTED.iterdir()))
def test_a_config_becomes_its_pipeline(name: str, tmp_path: Path) -> None:
    written = tmp_path / "pipeline.yaml"
    ran = _import(CONFIGS / f"{name}.yaml", "--json", "--output", str(written))
    document = json.loads(ran.stdout)
    reported = {key: sorted(item["path"] for item in document[key]) for key in ("not_carried", "not_needed")}
    expected = yaml.safe_load((IMPORTED / f"{name}.yaml").read_text())
    assert {"pipeline": document["pipeline"], **reported} == expected
    assert (ran.exit_code, document["missing"]) == (0, [])
    assert yaml.safe_load(document["file"]) == yaml.safe_load(written.read_text()) == expected["pipeline"]
    assert invoke("pipeline", "validate", str(written), "--no-models", "--no-import").exit_code == 0


def test_the_graph_of_a_deploy_config_can_be_set(tmp_path: Path) -> None:
    renamed = tmp_path / "mine.yaml"
    renamed.write_text((CONFIGS / "qwen3_tts.yaml").read_text())
    ran = _import(renamed)
    assert (ran.exit_code, ran.stdout) == (ExitCode.FAILED, "")
    assert ran.stderr.startswith("missing: pipeline: the file does not name its graph of stages; set --topology")
    ran = _import(renamed, "--topology", "qwen3_tts", "--name", "voice", "--model", "my/tts")
    assert (ran.exit_code, yaml.safe_load(ran.stdout)["pipeline"]) == (0, "voice")
    assert {stage["model"] for stage in yaml.safe_load(ran.stdout)["stages"].values()} == {"my/tts"}


def test_settings_of_another_step_cache_are_reported(tmp_path: Path) -> None:
    shown = _import(_changed(tmp_path, "qwen_image_cached", "cache_dit", "tea_cache")).stderr
    assert "not carried over: stages[0].cache_backend: the engine has no step cache tea_cache" in shown
    assert "not carried over: stages[0].cache_config.max_warmup_steps: " in shown


def test_a_stage_config_has_no_topology() -> None:
    ran = _import(CONFIGS / "qwen_image.yaml", "--topology", "qwen3_tts")
    ran.check(ExitCode.USAGE, "--topology is for deploy configs")


def test_a_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    ran = _import(CONFIGS / "qwen_image.yaml", "--output", str(tmp_path / "no" / "x.yaml"))
    ran.check(ExitCode.USAGE, "set --output to another file")


def test_an_unknown_language_model_needs_a_name() -> None:
    assert _missing("language_model") == ["model"]
    document = json.loads(_import(CONFIGS / "language_model.yaml", "--json", "--model", "my/model").stdout)
    assert document["pipeline"]["stages"] == {
        "stage-0": {
            "engine": "vllm",
            "model": "my/model",
            # The text of the config, not the value of a variable.
            "options": {"max_model_len": 2048, "tokenizer": "$${TOKENIZER}"},
        }
    }
    paths = {item["path"] for item in document["not_carried"]}
    assert paths == {"stage_args[0].engine_args.chat_color", "stage_args[0].engine_args.worker_cls"}


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("bagel", ["stage_args[1].engine_input_source", "stage_args[1].engine_args.omni_kv_config"]),
        ("bagel_deploy", ["pipeline"]),
        ("mimo_audio", ["stage_args[1].custom_process_input_func", "stage_args[1]"]),
        ("no_output", ["final_output"]),
        (
            "qwen3_omni_prefill_decode",
            ["stage_args[1].engine_input_source", "stage_args[0].is_prefill_only", "stage_args[1].is_decode_only"],
        ),
        ("qwen3_tts_one_stage", ["stage_args[0]"]),
        ("skyreels_video", ["stage_args[0].engine_args.model_class_name"]),
    ],
)
def test_what_prevents_a_pipeline_is_listed(name: str, missing: list[str]) -> None:
    assert _missing(name, "--model", "my/model") == missing


def test_mistakes_of_the_result_are_missing(tmp_path: Path) -> None:
    ran = _import(_changed(tmp_path, "qwen_image", "height: 512", "height: 0"))
    assert (ran.exit_code, ran.stdout) == (ExitCode.FAILED, "")
    assert "missing: pipeline file: stages.dit.options: " in ran.stderr


def test_the_report_goes_to_stderr() -> None:
    ran = _import(CONFIGS / "qwen2_5_omni.yaml")
    assert yaml.safe_load(ran.stdout)["pipeline"] == "qwen2-5-omni"
    assert (
        "not carried over: stage_args[0].default_sampling_params.seed: a seed belongs to a request; set it there "
        "(`stagemesh generate --seed`)\n"
    ) in ran.stderr


WRONG = yaml.safe_load((CONFIGS / "wrong.yaml").read_text())


@pytest.mark.parametrize("case", WRONG, ids=lambda case: case["message"])
def test_a_wrong_config_is_an_error_with_its_path(case: dict[str, str], tmp_path: Path) -> None:
    assert case["message"] in _refuse(tmp_path, case["config"])


def test_all_mistakes_of_a_kind_are_reported_at_once(tmp_path: Path) -> None:
    shown = _refuse(tmp_path, "stage_args: [{runtime: 3}, {stage_id: 1, engine_args: x}]")
    paths = ("stage_args[0].stage_id", "stage_args[0].runtime", "stage_args[1].engine_args")
    assert [path for path in paths if path not in shown] == []


@pytest.mark.timeout(300)  # vLLM may have to be compiled first
def test_copied_arguments_are_arguments_of_vllm() -> None:
    arguments = pytest.importorskip("vllm.engine.arg_utils").AsyncEngineArgs
    assert {*arguments.__dataclass_fields__} >= VLLM_ARGUMENTS
