"""Qwen2.5-Omni's token2wav as a streaming stage, compared with transformers' decode of the whole stream."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import JsonValue
from safetensors.torch import load_file, save_file
from transformers import Qwen2_5OmniConfig
from transformers.models.qwen2_5_omni.configuration_qwen2_5_omni import Qwen2_5OmniBigVGANConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniToken2WavBigVGANModel,
    Qwen2_5OmniToken2WavModel,
)

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, NotReadyError
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call
from stagemesh.services.models.checkpoint import load_weights
from stagemesh.services.models.qwen2_5_omni import token2wav
from stagemesh.services.models.qwen2_5_omni.description import load_speakers
from stagemesh.services.models.qwen2_5_omni.factory import make_token2wav
from stagemesh.services.models.qwen2_5_omni.token2wav import Stream, Token2Wav, context_frames
from stagemesh.tiny_models import qwen2_5_omni
from tests.models.vocoding import Codes, Samples, joined, pieces, push, push_all

CODES = np.random.default_rng(1).integers(0, qwen2_5_omni.CODEBOOK, (42, 1)).astype(np.int32)
BLOCK, MEL_SIZE, REPEATS = 8, 16, 2
SEED = 5
STEPS = 4
WHOLE = 256
ROUNDING = 1e-5
LARGEST_ERRORS = {1: 0.02, 2: 1e-3, 4: ROUNDING}
"""The largest relative errors of streams, by the number of blocks ahead."""
CUTTINGS = {"1": range(1, 42), "25": [25], "ramp": [1, 3, 7, 15, 31], "one chunk": []}


class Reference:
    """transformers' token2wav, with the noise of a stream."""

    def __init__(self, folder: Path) -> None:
        config: Any = Qwen2_5OmniConfig.from_pretrained(folder)
        self._model = Qwen2_5OmniToken2WavModel(config.token2wav_config)
        weights = load_weights(folder, "token2wav.")
        self._model.load_state_dict({name.removeprefix("token2wav."): weight for name, weight in weights.items()})
        self._model.train(mode=False)
        self._speakers = load_speakers(folder)

    def decode(self, codes: Codes, speaker: str = qwen2_5_omni.SPEAKERS[0]) -> Samples:
        frames, voice = len(codes) * REPEATS, self._speakers[speaker]
        noise = token2wav.draw_noise(SEED, range(-(-frames // BLOCK)), block=BLOCK, size=MEL_SIZE)
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(torch, "randn", lambda *_shape, **_options: torch.from_numpy(noise[None, :frames]))
            samples = self._model(
                torch.from_numpy(codes.T).long(),
                conditioning=voice.vector[None],
                reference_mel=voice.reference[None],
                num_steps=STEPS,
            )
        return np.asarray(samples, np.float32)


@pytest.fixture(scope="module")
def reference(tiny_qwen2_5_omni: Path) -> Reference:
    return Reference(tiny_qwen2_5_omni)


@pytest.fixture(scope="module")
def whole(reference: Reference) -> Samples:
    samples = reference.decode(CODES)
    assert 0.03 < samples.std() < 0.3
    assert np.abs(samples).max() < 1
    return samples


@pytest.fixture(scope="module")
def vocoder(tiny_qwen2_5_omni: Path) -> Token2Wav:
    return load(tiny_qwen2_5_omni, look_ahead_blocks=4)


def load(folder: Path, **options: JsonValue) -> Token2Wav:
    return make_token2wav(folder, {"device": "cpu", "steps": STEPS, **options})


def open_stream(vocoder: Token2Wav, speaker: str = "") -> Stream:
    return vocoder.open(seed=SEED, options={"speaker": speaker})


def decode(vocoder: Token2Wav, codes: Codes, cuts: Sequence[int] = (), speaker: str = "") -> Samples:
    stream = open_stream(vocoder, speaker)
    return np.concatenate([push(vocoder, stream, piece) for piece in (*pieces(codes, cuts), None)])


def relative_error(samples: Samples, expected: Samples) -> float:
    return float(np.square(samples - expected).mean() ** 0.5 / expected.std())


@pytest.mark.parametrize("speaker", qwen2_5_omni.SPEAKERS)
@pytest.mark.parametrize("length", [1, 3, 42])
def test_one_window_gives_the_samples_of_transformers(
    tiny_qwen2_5_omni: Path, reference: Reference, length: int, speaker: str
) -> None:
    samples = decode(load(tiny_qwen2_5_omni, look_ahead_blocks=WHOLE), CODES[:length], speaker=speaker)
    expected = reference.decode(CODES[:length], speaker)
    np.testing.assert_allclose(samples, expected, atol=ROUNDING, rtol=0)


@pytest.mark.parametrize("blocks", LARGEST_ERRORS)
@pytest.mark.parametrize("cutting", CUTTINGS)
def test_any_chunks_differ_from_a_whole_decode_by_the_look_ahead_alone(
    tiny_qwen2_5_omni: Path, whole: Samples, cutting: str, blocks: int
) -> None:
    samples = decode(load(tiny_qwen2_5_omni, look_ahead_blocks=blocks), CODES, CUTTINGS[cutting])
    assert len(samples) == len(whole)
    assert relative_error(samples, whole) < LARGEST_ERRORS[blocks]


def test_a_block_leaves_as_soon_as_its_look_ahead_has_arrived(tiny_qwen2_5_omni: Path, whole: Samples) -> None:
    vocoder = load(tiny_qwen2_5_omni, look_ahead_blocks=1)
    stream, hop = open_stream(vocoder), len(whole) // len(CODES)
    lengths = [len(push(vocoder, stream, CODES[number : number + 1])) for number in range(13)]
    in_block = BLOCK // REPEATS
    assert lengths == [in_block * hop if number in {7, 11} else 0 for number in range(13)]
    assert len(push(vocoder, stream, None)) == 5 * hop


def test_long_packets_are_decoded_in_pieces(
    vocoder: Token2Wav, whole: Samples, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token2wav, "_MAX_BLOCKS", 2)
    stream = open_stream(vocoder)
    (made,) = vocoder([Call(stream, Packet({"codes": CODES}))])
    assert {len(packet.tensors["audio"]) for packet in made} == {2 * BLOCK * len(whole) // (len(CODES) * REPEATS)}
    assert relative_error(np.concatenate([joined(made), push(vocoder, stream, None)]), whole) < ROUNDING


def test_streams_at_different_progress_share_batches(vocoder: Token2Wav, whole: Samples) -> None:
    starts = [0, 0, 4, 8, 9]
    streams = [open_stream(vocoder) for _ in starts]
    heard = [push(vocoder, stream, CODES[:start]) for stream, start in zip(streams, starts, strict=True)]
    for offset in range(0, 33, 16):
        made = push_all(vocoder, streams, [CODES[start + offset : start + offset + 16] for start in starts])
        heard = [np.concatenate(each) for each in zip(heard, made, strict=True)]
    for samples, each in zip(heard, vocoder([Call(stream, None) for stream in streams]), strict=True):
        assert relative_error(np.concatenate([samples, joined(each)]), whole) < ROUNDING


def test_the_seed_and_the_speaker_change_the_samples(vocoder: Token2Wav, whole: Samples) -> None:
    other = vocoder.open(seed=SEED + 1, options={})
    samples = np.concatenate([push(vocoder, other, CODES), push(vocoder, other, None)])
    assert relative_error(samples, whole) > 0.1
    assert relative_error(decode(vocoder, CODES, speaker="ethan"), whole) > 0.1


def test_the_memory_of_a_stream_is_constant(vocoder: Token2Wav) -> None:
    stream, sizes = open_stream(vocoder), set[int]()
    for number in range(16):
        push(vocoder, stream, CODES[number : number + 4])
        if number > 8:
            assert stream.past is not None
            assert stream.mel is not None
            storages = [each.untyped_storage().nbytes() for each in (stream.past, stream.mel)]
            sizes.add(sum(storages) + stream.codes.nbytes)
    assert len(sizes) == 1


def test_an_empty_stream_has_no_audio(vocoder: Token2Wav) -> None:
    assert not len(decode(vocoder, CODES[:0]))


def test_a_batch_that_fails_changes_no_state(vocoder: Token2Wav, whole: Samples) -> None:
    stream, wrong = open_stream(vocoder), open_stream(vocoder)
    heard = push(vocoder, stream, CODES[:22])
    bad = np.array([[1], [qwen2_5_omni.CODEC_EOS]], np.int32)
    with pytest.raises(InvalidChunkError, match=f"codec frame 1 has the code {qwen2_5_omni.CODEC_EOS} in group 0"):
        vocoder([Call(stream, Packet({"codes": CODES[22:]})), Call(wrong, Packet({"codes": bad}))])
    rest = [push(vocoder, stream, CODES[22:]), push(vocoder, stream, None)]
    assert relative_error(np.concatenate([heard, *rest]), whole) < ROUNDING


@pytest.mark.parametrize(
    ("rates", "kernels", "blocks"),
    [((4, 3), (8, 7), (3, 5)), ((5, 3, 2), (11, 7, 4), (3, 7, 11))],
    ids=str,
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


def copied(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to / "model"))


def test_missing_and_unknown_weights_are_listed(tiny_qwen2_5_omni: Path, tmp_path: Path) -> None:
    folder = copied(tiny_qwen2_5_omni, tmp_path)
    weights = load_file(folder / "model.safetensors")
    weights["token2wav.extra"] = weights.pop("token2wav.code2wav_bigvgan_model.conv_pre.bias")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(NotReadyError, match=r"missing: code2wav_bigvgan_model.conv_pre.bias; unknown: extra"):
        load(folder)


def test_a_weight_of_another_shape_is_named(tiny_qwen2_5_omni: Path, tmp_path: Path) -> None:
    folder = copied(tiny_qwen2_5_omni, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    config["token2wav_config"]["dit_config"]["num_embeds"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotReadyError, match="codec_embed"):
        load(folder)


@pytest.mark.parametrize("content", [None, b"", b"no tensors", {}, {"Chelsie": {"cond": 1}}], ids=str)
def test_a_file_without_speakers_is_an_error(tiny_qwen2_5_omni: Path, tmp_path: Path, content: object) -> None:
    folder = copied(tiny_qwen2_5_omni, tmp_path)
    path = folder / "spk_dict.pt"
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    with pytest.raises(NotReadyError, match=r"spk_dict\.pt"):
        load(folder)


def test_an_unknown_speaker_is_an_error_that_lists_the_known_ones(vocoder: Token2Wav) -> None:
    with pytest.raises(InvalidRequestError, match="no speaker 'Nobody'; choose one of: chelsie, ethan"):
        open_stream(vocoder, "Nobody")


def test_a_stage_without_model_is_an_error() -> None:
    with pytest.raises(InvalidRequestError, match="needs a checkpoint folder"):
        make_token2wav(None, {})


def test_a_checkpoint_of_another_model_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_omni_moe"}))
    with pytest.raises(NotReadyError, match="qwen2_5_omni"):
        load(tmp_path)
