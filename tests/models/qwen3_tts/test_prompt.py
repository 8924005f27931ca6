"""The stage of the prompt of a tiny Qwen3-TTS: rows equal to the reference, and requests that are rejected."""

import shutil
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from safetensors.numpy import load_file

from stagemesh.common.errors import InvalidRequestError, NotReadyError, UnsupportedError
from stagemesh.common.wire.tensors import Array, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.prompts import MediaFile, Medium, Samples
from stagemesh.services.models.qwen3_tts.prompt import PromptWriter, make_prompt_writer, read_voice
from tests.gateway.sounds import wav
from tests.models.checkpoints import changed, set_field
from tests.models.qwen3_tts import golden
from tests.models.qwen3_tts.prompts import Request, requests, talker_rows, write_prompt
from tests.models.qwen3_tts.voice import SAMPLE_RATE_HZ, synthesize_voice
from tests.rpc.call_errors import raises

Floats = npt.NDArray[np.float32]
VOICE_S = 1.3
VOICE = synthesize_voice(VOICE_S)


@pytest.fixture(scope="module")
def named(tiny_qwen3_tts: Path) -> PromptWriter:
    return make_prompt_writer(tiny_qwen3_tts, {})


@pytest.fixture(scope="module")
def cloning(tiny_qwen3_tts_base: Path) -> PromptWriter:
    return make_prompt_writer(tiny_qwen3_tts_base, {})


@pytest.fixture(scope="module")
def designing(tiny_qwen3_tts: Path, tmp_path_factory: pytest.TempPathFactory) -> PromptWriter:
    change = set_field("tts_model_type", "voice_design")
    return make_prompt_writer(changed(tiny_qwen3_tts, tmp_path_factory.mktemp("design"), change), {})


@cache
def weights_of(model: Path) -> Mapping[str, Floats]:
    return load_file(model / "model.safetensors")


def embed(model: Path, rows: Packet) -> Floats:
    """Returns the first elements of the input embeddings of rows, as the talker computes them."""
    weights, tensors = weights_of(model), rows.tensors
    hidden = weights["talker.model.text_embedding.weight"][tensors["text_ids"]]
    hidden = _linear(weights, "talker.text_projection.linear_fc1", hidden)
    total = _linear(weights, "talker.text_projection.linear_fc2", hidden / (1 + np.exp(-hidden)))
    for group, codes in enumerate(tensors["row_codes"].T):
        name = f"code_predictor.model.codec_embedding.{group - 1}" if group else "model.codec_embedding"
        total = total + weights[f"talker.{name}.weight"][codes] * (codes[:, None] >= 0)
    if "states" in tensors:
        total = total + tensors["states"].astype(np.float32)
    embedded: Floats = total[:, : golden.ELEMENTS]
    return embedded


def _linear(weights: Mapping[str, Floats], name: str, rows: Floats) -> Floats:
    product: Floats = rows @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]
    return product


@pytest.mark.parametrize("asked", requests(), ids=lambda each: each.name)
def test_rows_equal_the_reference(asked: Request, request: pytest.FixtureRequest) -> None:
    kind = "cloning" if asked.media else "named" if "speaker" in asked.options else "designing"
    model = request.getfixturevalue("tiny_qwen3_tts_base" if asked.media else "tiny_qwen3_tts")
    prompt, *later = talker_rows(write_prompt(request.getfixturevalue(kind), asked))
    assert prompt.metadata == {"token_start": 0, "prompt_tokens": len(asked.value("prompt"))}
    np.testing.assert_allclose(embed(model, prompt), asked.value("prompt"), atol=1e-4)
    # Without later rows, the talker adds padding, which the reference writes as a row.
    for rows in later:
        np.testing.assert_allclose(embed(model, rows), asked.value("trailing"), atol=1e-4)
    assert later or len(asked.value("trailing")) == 1


def test_the_decoder_receives_the_frames_that_the_talker_continues(cloning: PromptWriter) -> None:
    clones = [each for each in requests() if each.media]
    frames = {each.name: write_prompt(cloning, each)[0].tensors["reference_codes"] for each in clones}
    assert frames["long_text"].tolist() == golden.arrays()[f"{VOICE_S}/codes"].tolist()
    assert frames["x_vector"].shape == (0, 4)


def speak(
    writer: PromptWriter, *media: Medium, text: str = "Hello", options: Mapping[str, Value] | None = None
) -> Packet:
    """Returns the rows of a prompt."""
    return talker_rows(write_prompt(writer, Request("", text, options or {}, media)))[0]


def voice(samples: Array = VOICE, sample_rate_hz: int = SAMPLE_RATE_HZ) -> Samples:
    return Samples(samples, sample_rate_hz)


def test_space_around_texts_is_not_spoken(named: PromptWriter) -> None:
    plain = speak(named, options={"instruction": "Sad."})
    padded = speak(named, text=" \nHello\n", options={"instruction": " Sad. "})
    assert plain.tensors["text_ids"].tolist() == padded.tensors["text_ids"].tolist()


def test_the_first_voice_speaks_by_default(named: PromptWriter) -> None:
    default, serena = speak(named), speak(named, options={"speaker": "Serena"})
    assert default.tensors["row_codes"].tolist() == serena.tensors["row_codes"].tolist()


@pytest.mark.parametrize("rate_hz", [8_000, 44_100, 48_000])
def test_a_voice_at_another_sample_rate_is_resampled(
    cloning: PromptWriter, rate_hz: int, caplog: pytest.LogCaptureFixture
) -> None:
    times = np.arange(2 * rate_hz) / rate_hz
    tone, same = np.sin(880 * np.pi * times), np.sin(880 * np.pi * np.arange(2 * SAMPLE_RATE_HZ) / SAMPLE_RATE_HZ)
    with caplog.at_level("INFO"):
        made = read_voice([voice(tone.astype(np.float32), rate_hz)], media_bytes=1 << 24)
    assert abs(len(made) - len(same)) <= 2
    inner = slice(1000, 40_000)
    assert np.abs(made[inner] - same[inner]).max() < 0.01
    assert caplog.messages == [f"resampling a reference voice from {rate_hz} Hz to 24000 Hz"]


def test_a_file_is_a_voice() -> None:
    file = MediaFile("audio", wav(VOICE, SAMPLE_RATE_HZ), "audio/wav")
    np.testing.assert_allclose(read_voice([file], media_bytes=1 << 24), VOICE, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("media", "reason", "message"),
    [
        ([], "INVALID_PROMPT", "speaks with the voice of an audio; add one to the text"),
        ([voice(), voice()], "TOO_MANY_MEDIA", "the prompt has 2 media; send one audio"),
        ([MediaFile("image", b"x", "image/png")], "UNSUPPORTED", "reads no image; send an audio"),
        ([voice(VOICE[:12_000])], "INVALID_MEDIA", "has 0.50 s; send an audio of 1 to 60 s"),
        ([voice(np.full(61 * 8000, 0.5, np.float32), 8000)], "INVALID_MEDIA", "has 61.00 s; send an audio of 1 to 60"),
        ([voice(VOICE * 1e-4)], "INVALID_MEDIA", "is silent: its largest sample is .*, and must be above 0.001"),
        ([voice(VOICE * np.nan)], "INVALID_MEDIA", "it must be finite"),
        ([MediaFile("audio", b"RIFFxxxxWAVE", "audio/wav")], "INVALID_MEDIA", "the audio cannot be read"),
        ([voice(np.zeros((1 << 24) + 1, np.float32), 192_000)], "MEDIA_TOO_LARGE", "limit of 67108864"),
    ],
)
def test_unusable_voices_are_rejected(cloning: PromptWriter, media: list[Medium], reason: str, message: str) -> None:
    with pytest.raises((InvalidRequestError, UnsupportedError), match=message) as caught:
        speak(cloning, *media)
    assert caught.value.reason == reason


def test_a_model_without_an_encoder_rejects_a_voice(named: PromptWriter) -> None:
    with pytest.raises(InvalidRequestError, match="clones no voices; omit the audio, or choose a base model") as caught:
        speak(named, voice())
    assert caught.value.reason == "INVALID_PROMPT"


@pytest.mark.parametrize("text", ["", " \n"])
def test_a_prompt_without_text_is_rejected(named: PromptWriter, text: str) -> None:
    with raises(InvalidRequestError, reason="EMPTY_PROMPT", match="has no text to speak"):
        speak(named, text=text)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        ("named", {"speaker": "nobody"}, "no speaker 'nobody'; choose one of: dylan, eric, ryan, serena"),
        ("named", {"language": "klingon"}, "no language 'klingon'; choose one of: auto, chinese, english, german"),
        ("named", {"language": "beijing_dialect"}, "no language 'beijing_dialect'"),
        ("named", {"reference_text": "Hi"}, "clones no voices; omit the option, or choose a base model"),
        ("cloning", {"speaker": "ryan"}, "no voices by name; omit the speaker 'ryan', and send an audio of the voice"),
        ("cloning", {"instruction": "Sad."}, "follows no instructions; omit the option"),
        ("designing", {"speaker": "ryan"}, "no voices by name; omit the speaker 'ryan', and describe the voice"),
        ("small", {"instruction": "Sad."}, "follows no instructions; omit the option"),
    ],
)
def test_options_that_the_model_does_not_have_are_rejected(
    request: pytest.FixtureRequest, kind: str, options: Mapping[str, Value], message: str
) -> None:
    with raises(InvalidRequestError, reason="INVALID_OPTION", match=message) as caught:
        speak(request.getfixturevalue(kind), options=options)
    assert caught.value.metadata == {"option": next(iter(options))}


@pytest.fixture
def small(tiny_qwen3_tts: Path, tmp_path: Path) -> PromptWriter:
    return make_prompt_writer(changed(tiny_qwen3_tts, tmp_path, set_field("tts_model_size", "0b6")), {})


def test_a_folder_without_a_tokenizer_is_named(tiny_qwen3_tts: Path, tmp_path: Path) -> None:
    shutil.copy(tiny_qwen3_tts / "config.json", tmp_path)
    with raises(NotReadyError, reason="LOAD_FAILED", match="its tokenizer has no token"):
        make_prompt_writer(tmp_path, {})


def test_an_unknown_option_is_rejected(tiny_qwen3_tts: Path) -> None:
    with pytest.raises(InvalidRequestError, match="unknown option 'speed'; known: device, media_bytes"):
        make_prompt_writer(tiny_qwen3_tts, {"speed": 2})
