import json
from pathlib import Path

from stagemesh.common.errors import ExitCode
from tests.cli.commands import invoke


def test_models_are_listed_with_their_folders(tiny: Path) -> None:
    (tiny.parent / "home" / "models" / "hibari").mkdir(parents=True)
    models = {model["model"]: model for model in json.loads(invoke("models", "list", "--json").stdout)}
    assert models["hibari"]["path"] == str(tiny.parent / "home" / "models" / "hibari")
    assert models["smollm2-135m-instruct"]["path"] == ""


def test_a_missing_model_is_listed_with_its_remedy(tiny: Path) -> None:
    assert tiny.exists()
    assert "stagemesh models fetch speech" in invoke("models", "list").stdout


def test_a_tiny_model_is_written_and_described(tmp_path: Path) -> None:
    report = json.loads(invoke("models", "tiny", "qwen3-omni", str(tmp_path / "model"), "--json").stdout)
    assert report["folder"] == str(tmp_path / "model")
    assert report["size_bytes"] == sum(path.stat().st_size for path in (tmp_path / "model").iterdir())
    assert json.loads((tmp_path / "model" / "config.json").read_text())["model_type"] == "qwen3_omni_moe"


def test_a_tiny_model_is_written_over_other_files_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("mine")
    refused = invoke("models", "tiny", "qwen3-omni", str(tmp_path), "--json")
    assert json.loads(refused.stderr)["error"]["reason"] == "FOLDER_NOT_EMPTY"
    assert refused.exit_code == ExitCode.REFUSED
    assert (tmp_path / "config.json").read_text() == "mine"
    assert invoke("models", "tiny", "qwen3-omni", str(tmp_path), "--force").exit_code == 0
    assert (tmp_path / "config.json").read_text() != "mine"


def test_an_unknown_tiny_model_is_refused_with_the_known_names(tmp_path: Path) -> None:
    refused = invoke("models", "tiny", "qwen4", str(tmp_path), "--json")
    error = json.loads(refused.stderr)["error"]
    assert (error["reason"], refused.exit_code) == ("UNKNOWN_TINY_MODEL", ExitCode.NOT_FOUND)
    assert "qwen3-omni" in error["message"]


def test_a_tiny_model_in_place_of_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused = invoke("models", "tiny", "qwen3-omni", str(tmp_path / "file"), "--json")
    assert json.loads(refused.stderr)["error"]["reason"] == "CANNOT_WRITE"
