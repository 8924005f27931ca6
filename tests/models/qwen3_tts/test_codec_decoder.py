"""Qwen3-TTS's codec decoder as a streaming stage, compared with the waveforms of the reference implementation."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import JsonValue
from safetensors.torch import load_file, save_file

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, NotReadyError
from stagemesh.services.models.codec_speech.vocoder import CodecVocoder
from stagemesh.services.models.qwen3_tts.codec_decoder import make_codec_decoder
from tests.models.qwen3_tts.golden import STRIDE, arrays
from tests.models.vocoding import Codes, Samples, decode, push, push_all

SAMPLES_PER_FRAME = 1920
FRAMES = 50
ROUNDING = 3e-6
CUTTINGS = {"1": range(1, FRAMES), "4": range(4, FRAMES, 4), "25": [25], "ramp": [1, 3, 7, 15, 31]}


@pytest.fixture(scope="module")
def vocoder(tiny_qwen3_tts: Path) -> CodecVocoder:
    return load(tiny_qwen3_tts)


@pytest.fixture(scope="module")
def whole(vocoder: CodecVocoder) -> Samples:
    return decode(vocoder, codes(FRAMES))


def load(folder: Path, **options: JsonValue) -> CodecVocoder:
    return make_codec_decoder(folder, {"device": "cpu", **options})


def codes(frames: int = 0) -> Codes:
    given: Codes = arrays()["codes"].astype(np.int32)
    return given[: frames or len(given)]


def assert_equal(samples: Samples, expected: Samples) -> None:
    np.testing.assert_allclose(samples, expected, atol=ROUNDING, rtol=0)


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


def change_config(folder: Path, section: str | None = None, **changes: Any) -> None:
    path = folder / "speech_tokenizer/config.json"
    config = json.loads(path.read_text())
    (config[section] if section else config).update(changes)
    path.write_text(json.dumps(config))


def test_a_stream_gives_the_waveform_of_the_reference(vocoder: CodecVocoder) -> None:
    # The reference decodes 300 frames, and then the others with 25 frames before them.
    samples, start = decode(vocoder, codes()), arrays()["waveform_start"]
    assert len(samples) == len(codes()) * SAMPLES_PER_FRAME
    assert 0.05 < start.std() < 0.3
    assert np.abs(samples).max() < 1
    assert_equal(samples[: len(start)], start)
    assert_equal(samples[::STRIDE], arrays()["waveform"])


def test_both_kinds_of_checkpoint_have_the_same_codec(tiny_qwen3_tts_base: Path, whole: Samples) -> None:
    assert_equal(decode(load(tiny_qwen3_tts_base), codes(FRAMES)), whole)


@pytest.mark.parametrize("cutting", CUTTINGS)
def test_any_chunks_give_the_samples_of_a_whole_decode(vocoder: CodecVocoder, whole: Samples, cutting: str) -> None:
    assert_equal(decode(vocoder, codes(FRAMES), CUTTINGS[cutting]), whole)


def test_each_chunk_has_all_samples_of_its_frames(vocoder: CodecVocoder) -> None:
    state = vocoder.open(seed=0, options={})
    lengths = [len(push(vocoder, state, codes(FRAMES)[:frames])) for frames in (1, 2, 5)]
    assert lengths == [SAMPLES_PER_FRAME, 2 * SAMPLES_PER_FRAME, 5 * SAMPLES_PER_FRAME]


def test_streams_at_different_progress_share_batches(vocoder: CodecVocoder, whole: Samples) -> None:
    starts = range(0, 24, 3)
    states = [vocoder.open(seed=0, options={}) for _ in starts]
    heard = [push(vocoder, state, codes()[:start]) for state, start in zip(states, starts, strict=True)]
    for offset in range(0, 20, 10):
        made = push_all(vocoder, states, [codes()[start + offset : start + offset + 10] for start in starts])
        heard = [np.concatenate(each) for each in zip(heard, made, strict=True)]
    for samples, start in zip(heard, starts, strict=True):
        assert_equal(samples, whole[: (start + 20) * SAMPLES_PER_FRAME])


def test_bfloat16_is_close(tiny_qwen3_tts: Path, whole: Samples) -> None:
    samples = decode(load(tiny_qwen3_tts, dtype="bfloat16"), codes(FRAMES), CUTTINGS["25"])
    assert 0 < (samples - whole).std() < 0.05 * whole.std()


@pytest.mark.parametrize(
    "name",
    ["quantizer.rvq_rest.vq.layers.1._codebook.cluster_usage", "pre_conv.conv.bias", "pre_transformer.norm.weight"],
)
def test_missing_and_unknown_weights_are_listed(tiny_qwen3_tts: Path, tmp_path: Path, name: str) -> None:
    folder = copied(tiny_qwen3_tts, tmp_path)
    path = folder / "speech_tokenizer/model.safetensors"
    weights = load_file(path)
    weights["decoder.extra"] = weights.pop(f"decoder.{name}")
    save_file(weights, path, {"format": "pt"})
    with pytest.raises(NotReadyError, match=rf"missing: decoder\.{name}; unknown: decoder\.extra"):
        load(folder)


def test_a_weight_of_another_shape_is_named(tiny_qwen3_tts: Path, tmp_path: Path) -> None:
    folder = copied(tiny_qwen3_tts, tmp_path)
    change_config(folder, "decoder_config", latent_dim=41)
    with pytest.raises(
        NotReadyError, match=r"decoder\.pre_conv\.conv\.weight has \[40, 32, 3\] instead of \[41, 32, 3\]"
    ):
        load(folder)


@pytest.mark.parametrize(
    ("section", "changes", "problem"),
    [
        (None, {"model_type": "qwen3_tts_tokenizer_25hz"}, "but the stage needs 'qwen3_tts_tokenizer_12hz'"),
        (None, {"decoder_config": None}, "decoder_config is None"),
        ("decoder_config", {"codebook_dim": 33}, "decoder_config.codebook_dim is 33"),
        ("decoder_config", {"num_quantizers": 1}, "decoder_config.num_quantizers is 1"),
    ],
    ids=["type", "none", "width", "groups"],
)
def test_a_wrong_config_is_named(
    tiny_qwen3_tts: Path, tmp_path: Path, section: str | None, changes: dict[str, Any], problem: str
) -> None:
    folder = copied(tiny_qwen3_tts, tmp_path)
    change_config(folder, section, **changes)
    with pytest.raises(NotReadyError, match=problem):
        load(folder)


def test_a_checkpoint_without_codec_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=r"speech_tokenizer cannot be loaded: its config\.json cannot be read"):
        load(tmp_path)


def test_a_special_code_is_an_error_that_names_the_frame(vocoder: CodecVocoder) -> None:
    wrong = codes(FRAMES).copy()
    wrong[17, 0] = 166
    with pytest.raises(InvalidChunkError, match="codec frame 17 has the code 166 in group 0"):
        decode(vocoder, wrong)


def test_the_function_needs_a_model() -> None:
    with pytest.raises(InvalidRequestError, match="set the stage's `model`"):
        make_codec_decoder(None, {})
