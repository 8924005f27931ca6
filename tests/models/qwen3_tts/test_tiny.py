from pathlib import Path

import torch

from stagemesh.services.models.checkpoint import load_weights, read_config, read_section, weight_names
from stagemesh.services.models.codec_speech.streaming import BatchState, StreamState
from stagemesh.services.models.codec_speech.weights import Weights
from stagemesh.services.models.qwen3_tts.codec_decoder import CodecDecoder, CodecDecoderConfig
from stagemesh.tiny_models import qwen3_tts
from tests.models.qwen3_tts.golden import arrays, requests
from tests.models.qwen3_tts.test_codec_decoder import codes


def test_the_kinds_differ_in_projection_and_speaker_encoder(tiny_qwen3_tts: Path, tiny_qwen3_tts_base: Path) -> None:
    named, cloning = (weight_names(folder, "") for folder in (tiny_qwen3_tts, tiny_qwen3_tts_base))
    projection = {f"talker.code_predictor.small_to_mtp_projection.{kind}" for kind in ("weight", "bias")}
    assert named - cloning == projection
    assert {name.partition(".")[0] for name in cloning - named} == {"speaker_encoder"}


def test_golden_codes_vary_in_each_group_and_few_requests_end_early() -> None:
    frames = [arrays()[f"{name}/codes"] for name in requests()]
    lengths = [len(each) for each in frames]
    assert 1 <= sum(length < max(lengths) for length in lengths) <= 4
    for each in frames:
        assert each.max() < qwen3_tts.CODEBOOK
        assert all(len(set(group)) >= 5 for group in each.T.tolist())


def test_each_weight_of_the_codec_decoder_changes_the_waveform(tiny_qwen3_tts: Path) -> None:
    folder = tiny_qwen3_tts / "speech_tokenizer"
    config = read_section(folder, read_config(folder), name="decoder_config", kind=CodecDecoderConfig)
    weights = load_weights(folder, "decoder.")

    def waveform(**changes: torch.Tensor) -> torch.Tensor:
        device = torch.device("cpu")
        taken = Weights({**weights, **changes}, device=device, dtype=torch.float32, prefix="decoder.")
        return CodecDecoder(taken, config, device=device)(
            torch.from_numpy(codes(16))[None], BatchState([StreamState()])
        )

    with torch.inference_mode():
        before = waveform()
        for name, weight in weights.items():
            change = (waveform(**{name: 0.5 * weight + 0.1}) - before).abs().max()
            assert change > 1e-3 or name.endswith("input_proj.weight"), name
