"""Reading one stage's weights and config from a checkpoint folder."""

import json
import re
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_omni_moe.modeling_qwen3_omni_moe import Qwen3OmniMoeCode2Wav

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.services.models.checkpoint import load_weights, read_config
from stagemesh.services.models.qwen2_5_omni.factory import make_token2wav
from stagemesh.services.models.qwen3_omni.code2wav import make_code2wav
from stagemesh.services.models.qwen3_omni.transforms import Talker2Code2Wav
from stagemesh.services.models.qwen3_tts.codec_decoder import make_codec_decoder
from stagemesh.services.models.qwen3_tts.prompt import make_prompt_writer
from stagemesh.services.models.qwen3_tts.voices import load_reference_encoders
from tests.models.checkpoints import Change, changed, renamed, set_field
from tests.models.tiny_code2wav import PREFIX, shard, weights_of, write_checkpoint
from tests.rpc.call_errors import raises

CODEC, WEIGHTS, INDEX = "speech_tokenizer", "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def folder(code2wav_folder: Path, tmp_path: Path) -> Path:
    """A checkpoint of code2wav that the test may change."""
    return Path(shutil.copytree(code2wav_folder, tmp_path, dirs_exist_ok=True))


def error_of(folder: Path) -> str:
    with raises(NotReadyError, reason="LOAD_FAILED") as caught:
        make_code2wav(folder, {"device": "cpu"})
    return caught.value.message


def assert_loaded(weights: dict[str, Tensor], reference: Qwen3OmniMoeCode2Wav) -> None:
    expected = weights_of(reference)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_only_the_weights_with_the_prefix_are_read(folder: Path, code2wav_reference: Qwen3OmniMoeCode2Wav) -> None:
    assert_loaded(load_weights(folder, PREFIX), code2wav_reference)


def test_weights_are_read_from_several_shards(folder: Path, code2wav_reference: Qwen3OmniMoeCode2Wav) -> None:
    shard(folder, [PREFIX + "code_embedding.weight", PREFIX + "decoder.0.conv.bias"])
    assert_loaded(load_weights(folder, PREFIX), code2wav_reference)


def test_shards_of_other_stages_are_not_opened(folder: Path, code2wav_reference: Qwen3OmniMoeCode2Wav) -> None:
    shard(folder, ["talker.norm"])
    (folder / "model-00002-of-00002.safetensors").write_bytes(b"of another stage")
    assert_loaded(load_weights(folder, PREFIX), code2wav_reference)


def test_long_lists_of_weights_are_cut(tmp_path: Path, code2wav_reference: Qwen3OmniMoeCode2Wav) -> None:
    weights = {name: weight for name, weight in weights_of(code2wav_reference).items() if "upsample" not in name}
    message = error_of(write_checkpoint(tmp_path, code2wav_reference, weights=weights))
    assert message.count("code2wav.upsample") == 10
    assert "and 12 more" in message


def test_weights_of_another_shape_are_named(tmp_path: Path, code2wav_reference: Qwen3OmniMoeCode2Wav) -> None:
    weights = weights_of(code2wav_reference) | {PREFIX + "upsample.0.1.gamma": torch.ones(3)}
    message = error_of(write_checkpoint(tmp_path, code2wav_reference, weights=weights))
    assert "code2wav.upsample.0.1.gamma has [3] instead of [32]" in message


def test_a_missing_shard_is_named(folder: Path) -> None:
    shard(folder, ["talker.norm"])
    (folder / "model-00001-of-00002.safetensors").unlink()
    assert "its model-00001-of-00002.safetensors cannot be read" in error_of(folder)


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


LOADERS: Mapping[str, Callable[[Path], object]] = {
    "code2wav_folder": lambda folder: make_code2wav(folder, {"device": "cpu"}),
    "tiny_qwen2_5_omni": lambda folder: make_token2wav(folder, {"device": "cpu"}),
    "tiny_qwen3_tts": lambda folder: make_codec_decoder(folder, {"device": "cpu"}),
    "tiny_qwen3_tts_base": partial(load_reference_encoders, device="cpu"),
}
"""The function that loads a part of a model, by the name of the model's fixture."""


WRONG: Mapping[str, list[tuple[Change, str]]] = {
    "code2wav_folder": [
        (set_field("model_type", "qwen3_tts"), "the model_type 'qwen3_tts', but the stage needs 'qwen3_omni_moe'"),
        (set_field("code2wav_config", None), "code2wav_config is None"),
        (set_field("code2wav_config.hidden_size", "big"), r"code2wav_config\.hidden_size is 'big'"),
        (set_field("code2wav_config.upsampling_ratios", []), "no sample for the first frame"),
        renamed("code2wav.decoder.0.conv.bias", "code2wav.decoder.0.conv.gain"),
        (lambda folder: (folder / WEIGHTS).unlink(), f"neither {re.escape(WEIGHTS)} nor {re.escape(INDEX)}"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"no weights"), f"its {re.escape(WEIGHTS)} cannot be read"),
        (lambda folder: (folder / INDEX).write_text("{}"), f"{re.escape(INDEX)} has no weight_map"),
    ],
    "tiny_qwen2_5_omni": [
        (set_field("model_type", "qwen3_omni_moe"), "needs 'qwen2_5_omni'"),
        (set_field("token2wav_config.dit_config.num_embeds", 99), "codec_embed"),
        renamed("code2wav_bigvgan_model.conv_pre.bias", "extra", prefix="token2wav."),
    ],
    "tiny_qwen3_tts": [
        (
            lambda folder: shutil.rmtree(folder / CODEC),
            r"speech_tokenizer cannot be loaded: its config\.json cannot be",
        ),
        (set_field("model_type", "qwen3_tts_tokenizer_25hz", within=CODEC), "needs 'qwen3_tts_tokenizer_12hz'"),
        (set_field("decoder_config", None, within=CODEC), "decoder_config is None"),
        (set_field("decoder_config.codebook_dim", 33, within=CODEC), r"decoder_config\.codebook_dim is 33"),
        (set_field("decoder_config.num_quantizers", 1, within=CODEC), r"decoder_config\.num_quantizers is 1"),
        (
            set_field("decoder_config.latent_dim", 41, within=CODEC),
            r"decoder\.pre_conv\.conv\.weight has \[40, 32, 3\] instead of \[41, 32, 3\]",
        ),
        renamed("decoder.quantizer.rvq_rest.vq.layers.1._codebook.cluster_usage", "decoder.extra", within=CODEC),
        renamed("decoder.pre_conv.conv.bias", "decoder.extra", within=CODEC),
        renamed("decoder.pre_transformer.norm.weight", "decoder.extra", within=CODEC),
    ],
    "tiny_qwen3_tts_base": [
        (set_field("speaker_encoder_config", None), "speaker_encoder_config is None"),
        (set_field("speaker_encoder_config.enc_dim", "wide"), "enc_dim is 'wide'"),
        (set_field("speaker_encoder_config.enc_dim", 65), "the weights of the speaker encoder do not fit its config"),
        renamed("asp.conv.bias", "extra", prefix="speaker_encoder.", of="the speaker encoder in .* "),
        (set_field("encoder_config.hidden_size", "wide", within=CODEC), "'hidden_size' expected int"),
        (
            set_field("encoder_config.intermediate_size", 65, within=CODEC),
            "the weights of the codec encoder do not fit its config",
        ),
        renamed("downsample.conv.weight", "extra", prefix="encoder.", of="the codec encoder in .* ", within=CODEC),
    ],
}


@pytest.mark.parametrize(
    ("model", "change", "problem"), [(model, *each) for model, all_of_it in WRONG.items() for each in all_of_it]
)
def test_a_wrong_checkpoint_is_explained(
    request: pytest.FixtureRequest, tmp_path: Path, model: str, change: Change, problem: str
) -> None:
    folder = changed(request.getfixturevalue(model), tmp_path, change)
    with raises(NotReadyError, reason="LOAD_FAILED", match=problem):
        LOADERS[model](folder)


@pytest.mark.parametrize(
    "make",
    [make_code2wav, make_token2wav, make_codec_decoder, make_prompt_writer, lambda model, _: Talker2Code2Wav(model)],
)
def test_a_checkpoint_folder_is_required(make: Callable[[Path | None, Mapping[str, Any]], object]) -> None:
    with pytest.raises(InvalidRequestError, match=r"needs a checkpoint folder; set (the stage's `model`|`model` of)"):
        make(None, {})
