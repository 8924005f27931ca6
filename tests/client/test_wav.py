import wave
from pathlib import Path

import numpy as np
import pytest

from stagemesh.client import WavWriter
from stagemesh.common.errors import InvalidRequestError


def test_samples_become_16_bit_pcm(tmp_path: Path) -> None:
    with WavWriter(tmp_path / "new" / "a.wav") as writer:
        writer.write(np.array([0, 1], np.float32), sample_rate_hz=8000)
        writer.write(np.array([-1, 2], np.float32), sample_rate_hz=8000)
    with wave.open(str(tmp_path / "new" / "a.wav")) as file:
        assert (file.getframerate(), file.getsampwidth(), file.getnchannels()) == (8000, 2, 1)
        assert np.frombuffer(file.readframes(4), "<i2").tolist() == [0, 32767, -32767, 32767]


def test_channels_are_interleaved(tmp_path: Path) -> None:
    with WavWriter(tmp_path / "a.wav") as writer:
        writer.write(np.array([[0, 1], [1, 0]], np.float32), sample_rate_hz=8000)
    with wave.open(str(tmp_path / "a.wav")) as file:
        assert np.frombuffer(file.readframes(2), "<i2").tolist() == [0, 32767, 32767, 0]


def test_a_change_of_the_sample_rate_is_rejected(tmp_path: Path) -> None:
    with WavWriter(tmp_path / "a.wav") as writer:
        writer.write(np.zeros(1, np.float32), sample_rate_hz=8000)
        with pytest.raises(InvalidRequestError, match="16000"):
            writer.write(np.zeros(1, np.float32), sample_rate_hz=16000)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with WavWriter(tmp_path) as writer, pytest.raises(InvalidRequestError, match="cannot be written"):
        writer.write(np.zeros(1, np.float32), sample_rate_hz=8000)


def test_without_samples_there_is_no_file(tmp_path: Path) -> None:
    with WavWriter(tmp_path / "a.wav"):
        pass
    assert not (tmp_path / "a.wav").exists()
