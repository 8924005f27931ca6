"""A deployed tiny Qwen3-TTS that clones voices, compared with the reference: the same codes and the same waveform."""

import base64
import io
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import openai
import pytest

from stagemesh.client import AudioSamples, Client, Result, StageArguments
from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.prompts import Samples
from stagemesh.services.models.codec_speech import SAMPLE_RATE_HZ
from tests.deployment import Deployment, deployed
from tests.gateway.making import client as client_of
from tests.gateway.making import gateway
from tests.models.qwen3_tts.golden import STRIDE
from tests.models.qwen3_tts.prompts import Request, requests
from tests.models.qwen3_tts.voice import synthesize_voice
from tests.rpc.call_errors import raises

pytestmark = pytest.mark.timeout(240)

EXAMPLE = Path("examples/qwen3-tts/tiny.yaml")
OUTPUTS = "outputs: {audio: codec-decoder}"
CLONES = [request for request in requests() if request.media]


@pytest.fixture(scope="module")
def tts(tiny_qwen3_tts_base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    file = tmp_path_factory.mktemp("tts") / "tts.yaml"
    text = EXAMPLE.read_text()
    assert OUTPUTS in text
    file.write_text(text.replace(OUTPUTS, "outputs: {audio: codec-decoder, codes: talker.codes}"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STAGEMESH_TTS", str(tiny_qwen3_tts_base))
        with deployed(file) as deployment:
            yield deployment


def generate(client: Client, request: Request) -> Result:
    (voice,) = request.media
    assert isinstance(voice, Samples)
    audio = AudioSamples(voice.samples.astype(np.float32), voice.sample_rate_hz)
    talker: StageArguments = {"temperature": 0.0, "max_tokens": len(request.codes)}
    prompt: StageArguments = {"options": request.options}
    return client.generate([request.text, audio], stages={"prompt": prompt, "talker": talker}).result()


def check(result: Result, request: Request) -> None:
    assert np.concatenate([part.tensor for part in result.tensors["codes"]]).tolist() == request.codes
    assert result.audio is not None
    np.testing.assert_allclose(result.audio[::STRIDE], request.value("audio"), atol=1e-4, rtol=0)


@pytest.mark.parametrize("request_", CLONES, ids=lambda each: each.name)
def test_a_cloned_voice_equals_the_reference(tts: Deployment, request_: Request) -> None:
    with tts.client() as client:
        check(generate(client, request_), request_)


def test_eight_voices_at_once_equal_the_reference(tts: Deployment) -> None:
    asked = [*CLONES, *CLONES][:8]
    with tts.client() as client, ThreadPoolExecutor(len(asked)) as pool:
        results = list(pool.map(lambda request: generate(client, request), asked))
    for result, request in zip(results, asked, strict=True):
        check(result, request)


def test_a_rejected_voice_leaves_others_undisturbed(tts: Deployment) -> None:
    short = AudioSamples(synthesize_voice(0.5), SAMPLE_RATE_HZ)
    with tts.client() as client, ThreadPoolExecutor(1) as pool:
        other = pool.submit(generate, client, CLONES[0])
        with raises(InvalidRequestError, reason="INVALID_MEDIA", match=r"has 0\.50 s; send an audio of 1 to 60 s"):
            client.generate(["Hello", short]).result()
        check(other.result(), CLONES[0])


def test_the_gateway_clones_a_voice_that_is_sent_or_created(tts: Deployment, tmp_path: Path) -> None:
    request = next(each for each in CLONES if each.options.get("reference_text"))
    (voice,) = request.media
    assert isinstance(voice, Samples)
    file = io.BytesIO()
    with wave.open(file, "wb") as wav:
        wav.setparams((1, 4, voice.sample_rate_hz, 0, "NONE", "NONE"))
        wav.writeframes((voice.samples * (2**31 - 128)).astype(np.int32).tobytes())
    text = str(request.options["reference_text"])
    with gateway(tts.endpoint, arguments=["--voices", str(tmp_path)]) as url, client_of(url) as ai:

        def speak(voice: str | None, **reference: str) -> bytes:
            body = {
                "language": request.options.get("language", "auto"),
                "stages": {"talker": {"temperature": 0.0, "max_tokens": len(request.codes)}},
            }
            return ai.audio.speech.create(
                model="qwen3-tts",
                voice=voice,  # type: ignore[arg-type]
                input=request.text,
                response_format="wav",
                extra_body=body | reference,
            ).content

        sent = speak(
            None, ref_audio=f"data:audio/wav;base64,{base64.b64encode(file.getvalue()).decode()}", ref_text=text
        )
        ai.audio.voices.create(
            name="ada", audio_sample=("ada.wav", file.getvalue()), consent="", extra_body={"ref_text": text}
        )
        assert speak("ada") == sent
        with pytest.raises(openai.BadRequestError, match="no voices by name; omit the speaker 'eve'"):
            speak("eve")
    with wave.open(io.BytesIO(sent)) as wav:
        samples = np.frombuffer(wav.readframes(1 << 30), np.int16) / 32768
    np.testing.assert_allclose(samples[::STRIDE], request.value("audio"), atol=2e-3, rtol=0)
