"""Voices that callers create, at a gateway in this process, whose orchestrator follows a script."""

import asyncio
import os
import threading
import time
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from stagemesh.gateway import catalog
from stagemesh.gateway import voices as stored_voices
from stagemesh.v1 import tensor_pb2
from stagemesh.v1.orchestrator_pb2 import EdgeDescription
from stagemesh.v1.signature_pb2 import OptionSpec, Signature
from stagemesh.v1.tensor_pb2 import TypedValue
from tests.client.scripted import ScriptedOrchestrator, admitted, audio, ended, finished, served
from tests.gateway.making import asking, describe, error_of, rejection, served_with_tokens, serving
from tests.gateway.sounds import audio_file, encode, tone, wav
from tests.limits import files_of_at_most

SAMPLE = wav(tone(2.0))
WRONG_NAMES = ("", ".", "..", "../ada", "/etc/passwd", "a/b", "a\\b", ".ada", "ada.", " ada", "a\0b", "ä", "a" * 65)


def describe_speech(
    orchestrator: ScriptedOrchestrator, *, clones: bool = True, voices: tuple[str, ...] = ("alto",)
) -> None:
    """Gives the orchestrator the pipeline "p", which speaks, and has these voices."""
    text = TypedValue(text="")
    options = [OptionSpec(name="speaker", default_value=text, allowed_texts=voices)]
    if clones:
        options.append(OptionSpec(name="reference_text", default_value=text))
    describe(orchestrator, "audio", signature=Signature(media=clones, options=options))


@asynccontextmanager
async def voicing(folder: Path | None, **description: Any) -> AsyncGenerator[tuple[ScriptedOrchestrator, Any]]:
    """Yields an orchestrator that speaks, and a client of its gateway, which stores voices in the folder."""
    async with served() as orchestrator, asking(orchestrator, voices=None if folder is None else str(folder)) as ai:
        describe_speech(orchestrator, **description)
        orchestrator.scripts.append([admitted(), audio([0.25] * 2_400), ended("audio"), finished()])
        yield orchestrator, ai


async def speak(ai: Any, voice: object = "ada", **fields: Any) -> Any:
    return await ai.audio.speech.create(model="p", voice=voice, input="Hello.", response_format="pcm", **fields)


async def create(ai: Any, name: str = "ada", sample: bytes = SAMPLE, **fields: str) -> Any:
    file = ("a.wav", sample)
    return await ai.audio.voices.create(name=name, audio_sample=file, consent="cons_1", extra_body=fields or None)


async def listed(ai: Any) -> dict[str, str]:
    """Returns the types of the voices by their names."""
    found = await ai.get("/audio/voices", cast_to=object)
    assert found["voices"] == [each["id"] for each in found["data"]]
    return {each["name"]: each["type"] for each in found["data"]}


def names_in(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


@pytest.mark.parametrize("voice", ["ada", {"id": "ada"}])
async def test_a_created_voice_is_spoken_with(tmp_path: Path, voice: object) -> None:
    async with voicing(tmp_path) as (orchestrator, ai):
        created = await create(ai, ref_text="Good morning.")
        assert (created.id, created.name, created.object, created.type) == ("ada", "ada", "audio.voice", "audio_sample")
        await speak(ai, voice)
        request = orchestrator.requests[0]
        sound, text = request.input.conversation.messages[0].parts
        assert (sound.audio_file.data, sound.audio_file.media_type) == (SAMPLE, "audio/wav")
        assert text.text == "Hello."
        options = request.parameters.options
        assert {name: value.text for name, value in options.items()} == {"reference_text": "Good morning."}


async def test_voices_are_listed_read_and_deleted(tmp_path: Path) -> None:
    async with voicing(tmp_path) as (_, ai):
        await create(ai, "ada")
        await create(ai, "My voice 2.0_a-b", ref_text="Hi.")
        assert await listed(ai) == {"ada": "audio_sample", "My voice 2.0_a-b": "audio_sample", "alto": "built_in"}
        read = await ai.get("/audio/voices/My voice 2.0_a-b", cast_to=object)
        assert read["created_at"] == pytest.approx(time.time(), abs=30)
        assert (read["duration"], read["ref_text"], read["consent"]) == (2.0, "Hi.", "cons_1")
        deleted = await ai.audio.voices.delete("ada")
        assert (deleted.id, deleted.object, deleted.deleted) == ("ada", "audio.voice.deleted", True)
        assert await listed(ai) == {"My voice 2.0_a-b": "audio_sample", "alto": "built_in"}
        with pytest.raises(openai.NotFoundError, match="'ada'"):
            await ai.get("/audio/voices/ada", cast_to=object)


async def test_gateways_that_share_a_folder_share_voices(tmp_path: Path) -> None:
    async with voicing(tmp_path) as (_, first), voicing(tmp_path) as (_, second):
        await create(first)
        assert "ada" in await listed(second)
        await second.audio.voices.delete("ada")
        assert "ada" not in await listed(first)


@pytest.mark.parametrize("media_type", ["audio/wav", "audio/mpeg", "audio/flac", "audio/ogg"])
async def test_the_type_of_a_sample_is_that_of_its_content(tmp_path: Path, media_type: str) -> None:
    async with voicing(tmp_path) as (_, ai):
        await create(ai, sample=encode(tone(2.0), media_type))
        read = await ai.get("/audio/voices/ada", cast_to=object)
        assert read["mime_type"] == media_type
        assert read["duration"] == pytest.approx(2.0, abs=0.1)


def _float_wav(samples: list[float]) -> bytes:
    """Returns a WAV file of 32-bit floating-point samples at 16 kHz."""
    data = np.array(samples, "<f4").tobytes()
    header = b"fmt \x10\x00\x00\x00\x03\x00\x01\x00\x80\x3e\x00\x00\x00\xfa\x00\x00\x04\x00\x20\x00"
    size, whole_size = (count.to_bytes(4, "little") for count in (len(data), len(data) + 36))
    return b"".join((b"RIFF", whole_size, b"WAVE", header, b"data", size, data))


@pytest.mark.parametrize(
    ("sample", "message"),
    [
        (b"no audio" * 1000, "not one of wav, mp3"),
        (b"#EXTM3U\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n", "not one of wav, mp3"),
        (SAMPLE[:20_000], "ends after 20000 of"),
        (b"", "empty"),
        (wav(tone(0.5)), "0.50 s of audio; send 1 to 30 s"),
        (wav(tone(30.5)), "more than 30 s"),
        (audio_file("flac", "flac", rate_hz=655_350, layout="7.1"), "8 channels at 655,350 Hz; send at most 2"),
        (wav(tone(2.0, loudness=0.0005)), "silent"),
        (_float_wav([0.5] * 16_000 + [float("nan")] + [0.5] * 16_000), "finite"),
        (bytes(6 * 1024 * 1024 + 1), "may have 6291456"),
    ],
    ids=["text", "playlist", "truncated", "empty", "short", "long", "channels", "silent", "not-finite", "big"],
)
async def test_a_sample_that_cannot_be_used_is_rejected(tmp_path: Path, sample: bytes, message: str) -> None:
    async with voicing(tmp_path) as (_, ai):
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            await create(ai, sample=sample)
        assert caught.value.param == "audio_sample"
        assert await listed(ai) == {"alto": "built_in"}


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({"name": "ada"}, {}, "audio_sample"),
        ({"name": "ada", "audio_sample": "text"}, {}, "audio_sample"),
        ({"name": "ada"}, {"sample": SAMPLE}, "sample"),
        ({}, {"audio_sample": SAMPLE}, "name"),
        ({"name": "ada", "prompt": "a deep voice"}, {"audio_sample": SAMPLE}, "prompt"),
        ({"name": "ada", "type": "prompt"}, {"audio_sample": SAMPLE}, "type"),
        ({"name": "ada", "ref_text": "x" * 2001}, {"audio_sample": SAMPLE}, "ref_text"),
        *(({"name": name}, {"audio_sample": SAMPLE}, "name") for name in WRONG_NAMES),
    ],
)
async def test_wrong_fields_are_named(tmp_path: Path, fields: Any, files: Any, param: str) -> None:
    # Without any file, the client would not send a form.
    parts: dict[str, Any] = {name: ("a.wav", data) for name, data in files.items()} or {"": (None, "")}
    async with voicing(tmp_path / "voices") as (_, ai):
        answer = await ai._client.post("http://gateway/v1/audio/voices", data=fields, files=parts)
        assert error_of(answer)["param"] == param
        assert await listed(ai) == {"alto": "built_in"}
    assert names_in(tmp_path) == []


async def test_a_name_is_taken_once(tmp_path: Path) -> None:
    async with voicing(tmp_path) as (_, ai):
        results = await asyncio.gather(*(create(ai) for _ in range(4)), return_exceptions=True)
        failures = [each for each in results if isinstance(each, openai.ConflictError)]
        assert len(failures) == 3
        assert {each.code for each in failures} == {"voice_exists"}
        with pytest.raises(openai.ConflictError, match="'p' has a voice 'alto'"):
            await create(ai, "alto")
        assert await listed(ai) == {"ada": "audio_sample", "alto": "built_in"}


async def test_only_own_voices_can_be_deleted(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    async with voicing(tmp_path / "voices") as (_, ai):
        with pytest.raises(openai.BadRequestError, match="built in"):
            await ai.audio.voices.delete("alto")
        for name in ("bob", "..", "%2e%2e%2f%2e%2e%2foutside", ".."):
            answer = await ai._client.delete(f"http://gateway/v1/audio/voices/{name}")
            assert answer.status_code in {404, 405}
    assert outside.exists()


async def test_a_caller_has_a_limited_number_of_voices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_voices, "MAX_VOICES", 2)
    async with voicing(tmp_path) as (_, ai):
        for name in ("a", "b"):
            await create(ai, name)
        with pytest.raises(openai.BadRequestError, match="2 voices"):
            await create(ai, "c")
        await ai.audio.voices.delete("a")
        await create(ai, "c")
        assert set(await listed(ai)) == {"b", "c", "alto"}


async def test_callers_do_not_see_the_voices_of_others(tmp_path: Path) -> None:
    folder = tmp_path / "voices"
    callers = {"of-ada": "ada", "next-of-ada": "ada", "of-bob": "bob"}
    async with (
        served_with_tokens(tmp_path, callers) as (orchestrator, clients),
        asking(orchestrator, key="of-ada", tls=clients, voices=str(folder)) as ai,
    ):
        describe_speech(orchestrator)
        ada, bob, eve = ai, ai.with_options(api_key="of-bob"), ai.with_options(api_key="of-eve")
        await create(ada, "secret")
        assert await listed(bob) == {"alto": "built_in"}
        for refused in (bob.get("/audio/voices/secret", cast_to=object), bob.audio.voices.delete("secret")):
            with pytest.raises(openai.NotFoundError):
                await refused
        with pytest.raises(openai.BadRequestError, match="'secret'"):
            await speak(bob, "secret")
        await create(bob, "secret", ref_text="Mine.")
        await bob.audio.voices.delete("secret")
        assert set(await listed(ada.with_options(api_key="next-of-ada"))) == {"secret", "alto"}
        for refused in (create(eve), listed(eve), eve.audio.voices.delete("secret")):
            with pytest.raises(openai.AuthenticationError):
                await refused
        # A revoked token is refused at the next call.
        (tmp_path / "tokens.json").unlink()
        for refused in (listed(ada), speak(ada, "secret"), ada.audio.voices.delete("secret")):
            with pytest.raises(openai.AuthenticationError):
                await refused
    assert len(names_in(folder)) == 2


async def test_slow_voices_take_a_limited_number_of_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go, most, running = threading.Event(), 0, 0

    def list_slowly(_store: object, _owner: str) -> list[Any]:
        nonlocal most, running
        running, most = running + 1, max(most, running + 1)
        go.wait()
        running -= 1
        return []

    owners, own = list[str](), catalog.Catalog.owner

    async def own_noted(each: catalog.Catalog) -> str:
        owners.append(await own(each))
        return owners[-1]

    monkeypatch.setattr(stored_voices.VoiceStore, "list_voices", list_slowly)
    monkeypatch.setattr(catalog.Catalog, "owner", own_noted)
    async with voicing(tmp_path) as (_, ai), asyncio.timeout(30):
        lists = [asyncio.create_task(listed(ai)) for _ in range(40)]
        while len(owners) < 40 or running < 16:
            await asyncio.sleep(0.01)
        go.set()
        assert await asyncio.gather(*lists) == [{"alto": "built_in"}] * 40
    assert most == 16


async def test_without_a_folder_no_voice_can_be_created() -> None:
    async with voicing(None) as (_, ai):
        with pytest.raises(openai.BadRequestError, match="--voices FOLDER"):
            await create(ai)
        assert await listed(ai) == {"alto": "built_in"}
        with pytest.raises(openai.NotFoundError):
            await ai.audio.voices.delete("ada")


async def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    async with voicing(tmp_path) as (_, ai):
        with files_of_at_most(10_000), pytest.raises(openai.InternalServerError, match="no space is left") as caught:
            await create(ai)
        assert (caught.value.status_code, caught.value.code) == (507, "storage_full")
        assert not [file for _, _, files in os.walk(tmp_path) for file in files]
        await create(ai)
        assert "ada" in await listed(ai)


async def test_a_folder_that_cannot_be_written_is_an_error_of_the_server() -> None:
    async with voicing(Path("/sys/voices")) as (_, ai):
        with pytest.raises(openai.InternalServerError, match="permissions") as caught:
            await create(ai)
        assert (caught.value.status_code, caught.value.code) == (500, "store_denied")


async def test_a_folder_that_is_a_file_is_an_error_of_the_server(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    async with voicing(file) as (_, ai):
        for refused in (create(ai), ai.audio.voices.delete("ada")):
            with pytest.raises(openai.InternalServerError, match="cannot be reached") as caught:
                await refused
            assert (caught.value.status_code, caught.value.code) == (503, "store_unreachable")


async def test_what_a_killed_process_left_is_neither_listed_nor_kept(tmp_path: Path) -> None:
    new, old = (tmp_path / "everyone" / name for name in (".new", ".old"))
    for folder in (new, old):
        folder.mkdir(parents=True)
        (folder / "voice").write_bytes(SAMPLE)
    os.utime(old, (0, 0))
    async with voicing(tmp_path) as (_, ai):
        await create(ai)
        assert await listed(ai) == {"ada": "audio_sample", "alto": "built_in"}
    assert new.exists()
    assert not old.exists()


async def test_a_damaged_voice_can_be_deleted(tmp_path: Path) -> None:
    folder = tmp_path / "everyone" / "ada"
    folder.mkdir(parents=True)
    (folder / "voice").write_bytes(b"{")
    async with voicing(tmp_path) as (_, ai):
        assert await listed(ai) == {"alto": "built_in"}
        await ai.audio.voices.delete("ada")
        await create(ai)
        assert "ada" in await listed(ai)


async def test_a_voice_that_does_not_exist_is_named(tmp_path: Path) -> None:
    async with voicing(tmp_path) as (orchestrator, ai):
        with pytest.raises(openai.BadRequestError, match=r"no voice 'eve'.*use one of alto") as caught:
            await speak(ai, "eve")
        assert caught.value.param == "voice"
        await speak(ai, "alto")
        assert [each.parameters.options["speaker"].text for each in orchestrator.requests] == ["alto"]


async def test_a_stage_whose_voices_are_not_known_checks_them(tmp_path: Path) -> None:
    async with voicing(tmp_path, voices=()) as (orchestrator, ai):
        await speak(ai, "eve")
        assert orchestrator.requests[0].parameters.options["speaker"].text == "eve"


@pytest.mark.parametrize(
    ("clones", "other", "said"),
    [
        (False, {}, "cannot speak with the created voice 'ada'"),
        (True, {"ref_text": "Hi."}, "contradicts the created voice 'ada'"),
        (True, {"ref_audio": "data:audio/wav;base64,YQ=="}, "contradicts the created voice 'ada'"),
    ],
)
async def test_a_created_voice_that_cannot_be_used_is_an_error(
    tmp_path: Path, clones: bool, other: dict[str, str], said: str
) -> None:
    async with voicing(tmp_path, clones=clones) as (_, ai):
        await create(ai)
        with pytest.raises(openai.BadRequestError, match=said):
            await speak(ai, extra_body=other)


async def test_a_stream_of_text_is_not_spoken_with_a_created_voice(tmp_path: Path) -> None:
    async with served() as orchestrator:
        describe_speech(orchestrator)
        orchestrator.description.stages[0].signature.accepts.add(spec=tensor_pb2.TensorSpec(name="text"))
        orchestrator.description.edges.append(EdgeDescription(from_stage="@input", to_stage="stage"))
        async with serving(orchestrator.endpoint, voices=str(tmp_path)) as address:
            async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none") as ai:
                await create(ai)
            _, message = await rejection(f"ws://{address}/v1/audio/speech/stream?model=p&voice=ada")
    assert "the created voice 'ada' speaks only whole texts" in message
