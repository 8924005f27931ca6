"""Changes that the plugin makes in each of vLLM's processes."""

from pathlib import Path

import pytest
from vllm import ModelRegistry
from vllm.model_executor.models import registry

from stagemesh.services.engines.vllm.plugin import register


def test_a_model_class_is_inspected_in_the_stages_own_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    register()
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", ["false"])
    model = ModelRegistry.models["Qwen3ForCausalLM"]
    assert model.inspect_model_cls().is_text_generation_model
    assert [file.suffix for file in tmp_path.rglob("*Qwen3ForCausalLM*")] == [".json"]
