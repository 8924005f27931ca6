import json
from pathlib import Path

from tests.cli.commands import invoke


def test_models_are_listed_with_their_folders(tiny: Path) -> None:
    (tiny.parent / "home" / "models" / "hibari").mkdir(parents=True)
    models = {model["model"]: model for model in json.loads(invoke("models", "list", "--json").stdout)}
    assert models["hibari"]["path"] == str(tiny.parent / "home" / "models" / "hibari")
    assert models["smollm2-135m-instruct"]["path"] == ""


def test_a_missing_model_is_listed_with_its_remedy(tiny: Path) -> None:
    assert tiny.exists()
    assert "stagemesh models fetch speech" in invoke("models", "list").stdout
