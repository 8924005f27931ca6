"""The analysis of a reference voice, compared with the values of the reference implementation."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from stagemesh.services.models.qwen3_tts.voice_encoders import load_speaker_encoder
from stagemesh.services.models.qwen3_tts.voices import ReferenceEncoders, load_reference_encoders
from tests.models.qwen3_tts.golden import MEL_STRIDE, arrays
from tests.models.qwen3_tts.voice import synthesize_voice

SECONDS = (1.3, 3.9)
SAMPLES_PER_FRAME = 1920


@pytest.fixture(scope="module")
def encoders(tiny_qwen3_tts_base: Path) -> ReferenceEncoders:
    return load(tiny_qwen3_tts_base)


def load(folder: Path) -> ReferenceEncoders:
    return load_reference_encoders(folder, device="cpu")


def golden(seconds: float, name: str) -> npt.NDArray[Any]:
    return arrays()[f"{seconds}/{name}"]


@pytest.mark.parametrize("seconds", SECONDS)
def test_the_mel_spectrogram_is_that_of_the_reference(tiny_qwen3_tts_base: Path, seconds: float) -> None:
    speaker = load_speaker_encoder(tiny_qwen3_tts_base, device=torch.device("cpu"))
    spectrogram = speaker.convert(torch.from_numpy(synthesize_voice(seconds))).numpy()
    amplitudes, expected = np.exp(spectrogram[::MEL_STRIDE]), np.exp(golden(seconds, "mel"))
    # Processors round Fourier transforms differently, which the logarithm enlarges where there is nearly no sound.
    np.testing.assert_allclose(amplitudes, expected, atol=1e-7 * expected.max(), rtol=1e-4)


@pytest.mark.parametrize("seconds", SECONDS)
def test_the_vector_of_the_speaker_is_that_of_the_reference(encoders: ReferenceEncoders, seconds: float) -> None:
    vector, expected = encoders.speaker.embed(synthesize_voice(seconds)), golden(seconds, "x_vector")
    assert vector.shape == (encoders.speaker.width,)
    assert expected.std() > 0.5
    np.testing.assert_allclose(vector, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("seconds", SECONDS)
def test_codec_frames_are_those_of_the_reference(encoders: ReferenceEncoders, seconds: float) -> None:
    codes, expected = encoders.codec.encode(synthesize_voice(seconds)), golden(seconds, "codes")
    assert codes.dtype == np.int32
    assert all(len(set(group)) >= 6 for group in expected.T.tolist())
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize(("samples", "frames"), [(SAMPLES_PER_FRAME, 1), (2 * SAMPLES_PER_FRAME + 1, 3), (2400, 2)])
def test_the_last_frame_contains_the_rest_of_the_audio(encoders: ReferenceEncoders, samples: int, frames: int) -> None:
    voice = synthesize_voice(1)[:samples]
    assert encoders.codec.encode(voice).shape == (frames, encoders.codec.groups)


def test_a_tenth_of_a_second_and_silence_have_a_finite_vector(encoders: ReferenceEncoders) -> None:
    for voice in (synthesize_voice(0.1), np.zeros(2400, np.float32)):
        assert np.isfinite(encoders.speaker.embed(voice)).all()
