"""The analysis of a reference voice, compared with the values of the reference implementation."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file, save_file

from stagemesh.common.errors import NotReadyError
from stagemesh.services.models.qwen3_tts.voice_encoders import load_speaker_encoder
from stagemesh.services.models.qwen3_tts.voices import ReferenceEncoder, load_reference_voice
from tests.models.qwen3_tts.golden import MEL_STRIDE, arrays
from tests.models.qwen3_tts.voice import synthesize_voice

SECONDS = (1.3, 3.9)
SAMPLES_PER_FRAME = 1920


@pytest.fixture(scope="module")
def encoder(tiny_qwen3_tts_base: Path) -> ReferenceEncoder:
    return load(tiny_qwen3_tts_base)


def load(folder: Path) -> ReferenceEncoder:
    return load_reference_voice(folder, device=torch.device("cpu"))


def golden(seconds: float, name: str) -> npt.NDArray[Any]:
    return arrays()[f"{seconds}/{name}"]


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


@pytest.mark.parametrize("seconds", SECONDS)
def test_the_mel_spectrogram_is_that_of_the_reference(tiny_qwen3_tts_base: Path, seconds: float) -> None:
    speaker = load_speaker_encoder(tiny_qwen3_tts_base, device=torch.device("cpu"))
    spectrogram = speaker.convert(torch.from_numpy(synthesize_voice(seconds))).numpy()
    amplitudes, expected = np.exp(spectrogram[::MEL_STRIDE]), np.exp(golden(seconds, "mel"))
    # Processors round Fourier transforms differently, which the logarithm enlarges where there is nearly no sound.
    np.testing.assert_allclose(amplitudes, expected, atol=1e-7 * expected.max(), rtol=1e-4)


@pytest.mark.parametrize("seconds", SECONDS)
def test_the_vector_of_the_speaker_is_that_of_the_reference(encoder: ReferenceEncoder, seconds: float) -> None:
    vector, expected = encoder.embed(synthesize_voice(seconds)), golden(seconds, "x_vector")
    assert vector.shape == (encoder.width,)
    assert expected.std() > 0.5
    np.testing.assert_allclose(vector, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("seconds", SECONDS)
def test_codec_frames_are_those_of_the_reference(encoder: ReferenceEncoder, seconds: float) -> None:
    codes, expected = encoder.encode(synthesize_voice(seconds)), golden(seconds, "codes")
    assert codes.dtype == np.int32
    assert all(len(set(group)) >= 6 for group in expected.T.tolist())
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize(("samples", "frames"), [(SAMPLES_PER_FRAME, 1), (2 * SAMPLES_PER_FRAME + 1, 3), (2400, 2)])
def test_the_last_frame_contains_the_rest_of_the_audio(encoder: ReferenceEncoder, samples: int, frames: int) -> None:
    voice = synthesize_voice(1)[:samples]
    assert encoder.encode(voice).shape == (frames, encoder.groups)


def test_a_tenth_of_a_second_and_silence_have_a_finite_vector(encoder: ReferenceEncoder) -> None:
    for voice in (synthesize_voice(0.1), np.zeros(2400, np.float32)):
        assert np.isfinite(encoder.embed(voice)).all()


def test_a_checkpoint_without_speaker_encoder_is_an_error(tiny_qwen3_tts: Path) -> None:
    with pytest.raises(NotReadyError, match="speaker_encoder_config is None"):
        load(tiny_qwen3_tts)


@pytest.mark.parametrize(
    ("file", "prefix", "name", "what"),
    [
        ("model.safetensors", "speaker_encoder.", "asp.conv.bias", "speaker encoder"),
        ("speech_tokenizer/model.safetensors", "encoder.", "downsample.conv.weight", "codec encoder"),
    ],
    ids=["speaker", "codec"],
)
def test_missing_and_unknown_weights_are_listed(
    tiny_qwen3_tts_base: Path, tmp_path: Path, *, file: str, prefix: str, name: str, what: str
) -> None:
    folder = copied(tiny_qwen3_tts_base, tmp_path)
    weights = load_file(folder / file)
    weights[f"{prefix}extra"] = weights.pop(prefix + name)
    save_file(weights, folder / file, {"format": "pt"})
    with pytest.raises(NotReadyError, match=rf"the {what} in .* missing: {name}; unknown: extra"):
        load(folder)


@pytest.mark.parametrize(
    ("file", "section", "field", "problem"),
    [
        ("config.json", "speaker_encoder_config", "enc_dim", "enc_dim is 'wide'"),
        ("speech_tokenizer/config.json", "encoder_config", "hidden_size", "'hidden_size' expected int"),
    ],
    ids=["speaker", "codec"],
)
def test_a_wrong_config_is_named(
    tiny_qwen3_tts_base: Path, tmp_path: Path, *, file: str, section: str, field: str, problem: str
) -> None:
    folder = copied(tiny_qwen3_tts_base, tmp_path)
    config = json.loads((folder / file).read_text())
    config[section][field] = "wide"
    (folder / file).write_text(json.dumps(config))
    with pytest.raises(NotReadyError, match=problem):
        load(folder)


@pytest.mark.parametrize(
    ("file", "section", "field", "what"),
    [
        ("config.json", "speaker_encoder_config", "enc_dim", "speaker encoder"),
        ("speech_tokenizer/config.json", "encoder_config", "intermediate_size", "codec encoder"),
    ],
    ids=["speaker", "codec"],
)
def test_a_weight_of_another_shape_is_an_error(
    tiny_qwen3_tts_base: Path, tmp_path: Path, *, file: str, section: str, field: str, what: str
) -> None:
    folder = copied(tiny_qwen3_tts_base, tmp_path)
    config = json.loads((folder / file).read_text())
    config[section][field] += 1
    (folder / file).write_text(json.dumps(config))
    with pytest.raises(NotReadyError, match=f"the weights of the {what} do not fit its config"):
        load(folder)


def test_descriptors_do_not_load_torch() -> None:
    code = "import stagemesh.services.models.qwen3_tts, sys; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
