"""Reading one stage's weights from a checkpoint folder."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from stagemesh.common.errors import NotReadyError
from stagemesh.services.models.checkpoint import load_weights, read_config
from stagemesh.services.models.qwen3_omni.code2wav import make_code2wav
from tests.models.tiny_code2wav import PREFIX, make_reference, shard, weights_of, write_checkpoint


@pytest.fixture(scope="module")
def reference() -> Qwen3OmniMoeCode2Wav:
    return make_reference()


@pytest.fixture
def folder(reference: Qwen3OmniMoeCode2Wav, tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path, reference)


def error_of(folder: Path) -> str:
    with pytest.raises(NotReadyError) as caught:
        make_code2wav(folder, {"device": "cpu"})
    assert caught.value.reason == "LOAD_FAILED"
    return caught.value.message


def assert_loaded(weights: dict[str, Tensor], reference: Qwen3OmniMoeCode2Wav) -> None:
    expected = weights_of(reference)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_only_the_weights_with_the_prefix_are_read(folder: Path, reference: Qwen3OmniMoeCode2Wav) -> None:
    assert_loaded(load_weights(folder, PREFIX), reference)


def test_weights_are_read_from_several_shards(folder: Path, reference: Qwen3OmniMoeCode2Wav) -> None:
    shard(folder, [PREFIX + "code_embedding.weight", PREFIX + "decoder.0.conv.bias"])
    assert_loaded(load_weights(folder, PREFIX), reference)


def test_shards_without_the_stages_weights_are_not_opened(folder: Path, reference: Qwen3OmniMoeCode2Wav) -> None:
    shard(folder, ["talker.norm"])
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"of another stage")
    assert_loaded(load_weights(folder, PREFIX), reference)


def test_missing_and_unknown_weights_are_named(tmp_path: Path, reference: Qwen3OmniMoeCode2Wav) -> None:
    weights = weights_of(reference)
    del weights[PREFIX + "decoder.0.conv.bias"]
    weights[PREFIX + "decoder.0.conv.gain"] = torch.ones(1)
    message = error_of(write_checkpoint(tmp_path, reference, weights=weights))
    assert "missing: code2wav.decoder.0.conv.bias; unknown: code2wav.decoder.0.conv.gain;" in message


def test_long_lists_of_weights_are_cut(tmp_path: Path, reference: Qwen3OmniMoeCode2Wav) -> None:
    weights = {name: weight for name, weight in weights_of(reference).items() if "upsample" not in name}
    message = error_of(write_checkpoint(tmp_path, reference, weights=weights))
    assert message.count("code2wav.upsample") == 10
    assert "and 12 more" in message


def test_weights_of_another_shape_are_named(tmp_path: Path, reference: Qwen3OmniMoeCode2Wav) -> None:
    weights = weights_of(reference) | {PREFIX + "upsample.0.1.gamma": torch.ones(3)}
    message = error_of(write_checkpoint(tmp_path, reference, weights=weights))
    assert "code2wav.upsample.0.1.gamma has [3] instead of [32]" in message


def test_a_checkpoint_without_weights_is_an_error(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "neither model.safetensors nor model.safetensors.index.json" in error_of(folder)


def test_a_corrupt_file_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"no weights")
    assert "its model.safetensors cannot be read" in error_of(folder)


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder, ["talker.norm"])
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert "its model-00001-of-00002.safetensors cannot be read" in error_of(folder)


def test_an_index_without_a_map_is_an_error(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("{}")
    assert "model.safetensors.index.json has no weight_map" in error_of(folder)


@pytest.mark.parametrize("content", ["", "[]", "{", None])
def test_a_config_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(NotReadyError, match=r"its config\.json"):
        read_config(tmp_path)


def test_a_missing_field_of_a_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"talker_config": {"text_config": {}}}))
    config = read_config(tmp_path)
    with pytest.raises(NotReadyError, match=r"has no talker_config\.text_config\.vocab_size; check"):
        config["talker_config"]["text_config"]["vocab_size"]
    assert config.get("thinker_config") is None


def test_a_config_is_read_whatever_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "any"}))
    assert read_config(tmp_path) == {"model_type": "any"}
