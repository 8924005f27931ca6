"""The transform between Qwen3-Omni's talker and code2wav."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.common.plugins.entry_points import import_factory, load_transform_descriptor
from stagemesh.connectors.packets import Packet
from stagemesh.services.models.qwen3_omni.transforms import Talker2Code2Wav

CODES = np.array([[0, 9], [7, 1], [8, 1], [3, 3], [9, 0]], np.int32)
SPOKEN = CODES[[0, 1, 3]]


def folder_of(path: Path, codebook_size: object) -> Path:
    config = {"model_type": "qwen3_omni_moe", "code2wav_config": {"codebook_size": codebook_size}}
    (path / "config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("cuts", [[], [1, 2, 3, 4], [2], [3]], ids=str)
def test_frames_with_special_codes_are_removed(tmp_path: Path, cuts: list[int]) -> None:
    transform = Talker2Code2Wav(folder_of(tmp_path, 8))
    made = [
        packet.tensors["codes"]
        for start, end in itertools.pairwise([0, *cuts, len(CODES)])
        for packet in transform.push(Packet({"codes": CODES[start:end]}, {"part": 1}))
    ]
    assert all(len(codes) for codes in made)
    np.testing.assert_array_equal(np.concatenate([*made, *transform.finish()]), SPOKEN)


def test_an_edge_finds_the_transform_by_its_name(tmp_path: Path) -> None:
    descriptor = load_transform_descriptor("qwen3_omni.talker2code2wav")
    transform = import_factory(descriptor.factory)(folder_of(tmp_path, 10))
    assert [packet.tensors["codes"].tolist() for packet in transform.push(Packet({"codes": CODES}))] == [CODES.tolist()]


def test_the_transform_needs_a_model() -> None:
    with pytest.raises(InvalidRequestError, match="needs a checkpoint folder"):
        Talker2Code2Wav(None)


def test_a_wrong_codebook_size_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotReadyError, match=r"code2wav_config\.codebook_size is 0"):
        Talker2Code2Wav(folder_of(tmp_path, 0))
