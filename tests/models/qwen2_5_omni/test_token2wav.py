"""Qwen2.5-Omni's token2wav as a streaming stage, compared with transformers' decode of the whole stream."""

from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import JsonValue
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavBigVGANModel

from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call
from stagemesh.services.models.qwen2_5_omni import token2wav
from stagemesh.services.models.qwen2_5_omni.factory import make_token2wav
from stagemesh.services.models.qwen2_5_omni.token2wav import Token2Wav, context_frames
from stagemesh.tiny_models import qwen2_5_omni
from tests.models.checkpoints import changed
from tests.models.tiny_code2wav import random_codes
from tests.models.tiny_token2wav import BLOCK, REPEATS, STEPS, DecodeReference
from tests.models.vocoding import SEED, Samples, decode, joined, push

CODES = random_codes(42, groups=1)
WHOLE = 256
ROUNDING = 1e-5
LARGEST_ERRORS = {1: 0.02, 2: 1e-3}
"""The largest relative errors of streams, by the number of blocks ahead."""
CUTTINGS = {"1": range(1, 42), "25": [25], "ramp": [1, 3, 7, 15, 31], "one chunk": []}


@pytest.fixture(scope="module")
def reference(tiny_qwen2_5_omni: Path) -> DecodeReference:
    return DecodeReference(tiny_qwen2_5_omni)


@pytest.fixture(scope="module")
def whole(reference: DecodeReference) -> Samples:
    return reference.decode(CODES)


@pytest.fixture(scope="module")
def vocoder(tiny_qwen2_5_omni: Path) -> Token2Wav:
    return load(tiny_qwen2_5_omni, look_ahead_blocks=4)


def load(folder: Path, **options: JsonValue) -> Token2Wav:
    return make_token2wav(folder, {"device": "cpu", "steps": STEPS, **options})


def relative_error(samples: Samples, expected: Samples) -> float:
    return float(np.square(samples - expected).mean() ** 0.5 / expected.std())


@pytest.mark.parametrize("speaker", qwen2_5_omni.SPEAKERS)
@pytest.mark.parametrize("length", [1, 3, 42])
def test_one_window_is_exact(tiny_qwen2_5_omni: Path, reference: DecodeReference, length: int, speaker: str) -> None:
    samples = decode(load(tiny_qwen2_5_omni, look_ahead_blocks=WHOLE), CODES[:length], speaker=speaker)
    np.testing.assert_allclose(samples, reference.decode(CODES[:length], speaker), atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("blocks", LARGEST_ERRORS)
@pytest.mark.parametrize("cutting", CUTTINGS)
def test_chunks_differ_by_their_look_ahead(tiny_qwen2_5_omni: Path, whole: Samples, cutting: str, blocks: int) -> None:
    samples = decode(load(tiny_qwen2_5_omni, look_ahead_blocks=blocks), CODES, CUTTINGS[cutting])
    assert len(samples) == len(whole)
    assert relative_error(samples, whole) < LARGEST_ERRORS[blocks]


def test_a_block_leaves_as_soon_as_its_look_ahead_has_arrived(tiny_qwen2_5_omni: Path, whole: Samples) -> None:
    vocoder = load(tiny_qwen2_5_omni, look_ahead_blocks=1)
    stream, hop = vocoder.open(seed=SEED, options={}), len(whole) // len(CODES)
    lengths = [len(push(vocoder, stream, CODES[number : number + 1])) for number in range(13)]
    assert lengths == [BLOCK // REPEATS * hop if number in {7, 11} else 0 for number in range(13)]
    assert len(push(vocoder, stream, None)) == 5 * hop


def test_long_packets_become_pieces(vocoder: Token2Wav, whole: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token2wav, "_MAX_BLOCKS", 2)
    stream = vocoder.open(seed=SEED, options={})
    (made,) = vocoder([Call(stream, Packet({"codes": CODES}))])
    assert {len(packet.tensors["audio"]) for packet in made} == {2 * BLOCK * len(whole) // (len(CODES) * REPEATS)}
    assert relative_error(np.concatenate([joined(made), push(vocoder, stream, None)]), whole) < ROUNDING


def test_the_seed_and_the_speaker_change_the_samples(vocoder: Token2Wav, whole: Samples) -> None:
    other = vocoder.open(seed=SEED + 1, options={})
    samples = np.concatenate([push(vocoder, other, CODES), push(vocoder, other, None)])
    assert relative_error(samples, whole) > 0.1
    assert relative_error(decode(vocoder, CODES, speaker="ethan"), whole) > 0.1


@pytest.mark.parametrize(
    ("rates", "kernels", "blocks"), [((4, 3), (8, 7), (3, 5)), ((5, 3, 2), (11, 7, 4), (3, 7, 11))], ids=str
)
def test_samples_depend_on_the_context_frames_alone(
    rates: tuple[int, ...], kernels: tuple[int, ...], blocks: tuple[int, ...]
) -> None:
    config = Qwen2_5OmniBigVGANConfig(
        mel_dim=4,
        upsample_initial_channel=8,
        upsample_rates=rates,
        upsample_kernel_sizes=kernels,
        resblock_kernel_sizes=blocks,
        resblock_dilation_sizes=[[1, 3, 5]] * len(blocks),
    )
    bigvgan = Qwen2_5OmniToken2WavBigVGANModel(config).double()
    for weight in bigvgan.parameters():
        torch.nn.init.constant_(weight, 0.05)
    torch.nn.init.constant_(bigvgan.conv_post.weight, 1e-6)
    context, hop = context_frames(bigvgan), int(np.prod(rates))
    mel = torch.zeros(1, 4, 4 * context, dtype=torch.float64)
    changed = mel.clone()
    changed[..., 2 * context] = 1.0
    with torch.inference_mode():
        affected = torch.nonzero((bigvgan(mel) - bigvgan(changed)).abs() > 1e-20).flatten() // hop
    assert 0.4 * context < 2 * context - affected.min() <= context
    assert 0.4 * context < affected.max() - 2 * context <= context


@pytest.mark.parametrize("content", [None, b"", b"no tensors", {}, {"Chelsie": {"cond": 1}}], ids=str)
def test_a_file_without_speakers_is_an_error(tiny_qwen2_5_omni: Path, tmp_path: Path, content: object) -> None:
    def write(folder: Path) -> None:
        path = folder / "spk_dict.pt"
        path.unlink()
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content is not None:
            torch.save(content, path)

    with pytest.raises(NotReadyError, match=r"spk_dict\.pt"):
        load(changed(tiny_qwen2_5_omni, tmp_path, write))


def test_an_unknown_speaker_is_an_error_that_lists_the_known_ones(vocoder: Token2Wav) -> None:
    with pytest.raises(InvalidRequestError, match="no speaker 'Nobody'; choose one of: chelsie, ethan"):
        vocoder.open(seed=0, options={"speaker": "Nobody"})
