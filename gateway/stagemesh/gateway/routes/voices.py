"""`/v1/audio/voices`: voices that callers create from audio, and those that the models have."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Annotated, Any, Literal, TypeVar

from fastapi import APIRouter, Request
from pydantic import Field
from starlette.requests import HTTPConnection

from stagemesh.common.errors import ExistsError, InvalidRequestError, NotFoundError, UnsupportedError
from stagemesh.common.media.decoding import DecodedBytes
from stagemesh.common.media.stored_file import call_store
from stagemesh.gateway import parameters
from stagemesh.gateway.audio import Measured, decode, measure
from stagemesh.gateway.body import Body, read_form, validate
from stagemesh.gateway.catalog import OPENAI_VOICES, Model, catalog_of
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.voices import StoredVoice, Voice, VoiceStore, is_voice_name

router = APIRouter()
T = TypeVar("T")

MIN_S, MAX_S = 1.0, 30.0
"""The shortest and the longest audio of a voice, in seconds."""
MAX_BYTES = 6 << 20
"""The largest file of a voice: 30 s at 48,000 Hz with two channels of 16 bits. A request to a pipeline has 8 MiB."""
MAX_DECODED_BYTES = 2 * MAX_BYTES
"""The limit for the decoded audio of a voice, all channels as float32."""
_SILENCE = 1e-3
"""The largest sample of audio that is silent (-60 dB)."""
_FILE = "audio_sample"
_OBJECT = "audio.voice"
_TEXT_LENGTH = 2000
_THREADS = ThreadPoolExecutor(16, "voices")


class CreateVoiceBody(Body):
    """The fields of a form that creates a voice: OpenAI's, and `ref_text` of vLLM-Omni."""

    rules = parameters.RULES["voice"]

    name: str
    type: Literal["audio_sample"] = "audio_sample"
    ref_text: Annotated[str | None, Field(max_length=_TEXT_LENGTH)] = None
    consent: Annotated[str | None, Field(max_length=256)] = None


@router.post("/v1/audio/voices")
async def create_voice(request: Request) -> dict[str, Any]:
    """Creates a voice from audio. The body is a form with the file `audio_sample`."""
    if request.app.state.voices is None:
        raise UnsupportedError(
            "this gateway stores no voices; its operator must name a folder for them: stagemesh gateway --voices FOLDER"
        )
    form = await read_form(request, file=_FILE, max_bytes=MAX_BYTES)
    data = form.files[0].data
    body = validate(CreateVoiceBody, form.fields)
    _check_name(body.name, await (await catalog_of(request)).models())
    decoded = DecodedBytes(MAX_DECODED_BYTES, remedy="convert it to 48,000 Hz")
    work = partial(measure, data, param=_FILE, decoded=decoded, max_s=MAX_S)
    voice = _describe(body, await decode(request, work, decoded))
    await _call(request, lambda store, owner: store.create(owner, StoredVoice(voice, data)), None)
    return _to_object(voice)


@router.get("/v1/audio/voices")
async def list_voices(request: Request) -> dict[str, Any]:
    """Lists the voices that the caller created, and those of the models that can be reached."""
    voices = [*map(_to_object, await _created(request)), *(await _built_in(request)).values()]
    return {"object": "list", "data": voices, "voices": [each["id"] for each in voices]}


@router.get("/v1/audio/voices/{voice_id}")
async def read_voice(voice_id: str, request: Request) -> dict[str, Any]:
    """Describes a voice."""
    created = next((each for each in await _created(request) if each.name == voice_id), None)
    if created is not None:
        return _to_object(created)
    built_in = (await _built_in(request)).get(voice_id)
    if built_in is None:
        raise _unknown(voice_id)
    return built_in


@router.delete("/v1/audio/voices/{voice_id}")
async def delete_voice(voice_id: str, request: Request) -> dict[str, Any]:
    """Deletes a voice that the caller created."""
    if not await _call(request, lambda store, owner: store.delete(owner, voice_id), False):
        if voice_id in await _built_in(request):
            raise InvalidRequestError(f"the voice {voice_id!r} is built in, so that it cannot be deleted")
        raise _unknown(voice_id)
    return {"id": voice_id, "object": f"{_OBJECT}.deleted", "deleted": True}


async def find_created_voice(connection: HTTPConnection, name: str, model: Model) -> StoredVoice | None:
    """Returns the voice of this name that the caller created.

    Returns None if the name is for the model's own option, and the caller has created none of this name: the model
    lists the name, accepts any, or has a default for it (`Model.find_voice`). Raises ParameterError if neither knows
    the name, or if the model cannot clone the created voice.
    """
    name = model.voice_aliases.get(name, name)
    if name in model.voices:
        return None
    stored = await _call(connection, lambda store, owner: store.read(owner, name), None)
    if stored is None:
        # A stage whose option allows any text checks it itself.
        if name in OPENAI_VOICES or (not model.voices and model.option("voice") is not None):
            return None
        raise ParameterError(
            "voice",
            f"the model {model.id!r} has no voice {name[:140]!r}, and you have created none of this name; "
            + (f"use one of {', '.join(model.voices)}" if model.voices else "omit the parameter")
            + ", or create it by POST /v1/audio/voices",
            reason="INVALID_OPTION",
        )
    if not model.clones_voices:
        raise ParameterError(
            "voice",
            f"the model {model.id!r} cannot speak with the created voice {name!r}; use a model that clones voices",
        )
    return stored


def _describe(body: CreateVoiceBody, measured: Measured) -> Voice:
    """Returns the description of a voice. Raises ParameterError (INVALID_MEDIA) if its audio cannot be used."""
    media_type, duration_s, peak = measured
    if not MIN_S <= duration_s <= MAX_S:
        length = f"more than {MAX_S:g}" if duration_s > MAX_S else f"{duration_s:.2f}"
        raise ParameterError(
            _FILE, f"it has {length} s of audio; send {MIN_S:g} to {MAX_S:g} s", reason="INVALID_MEDIA"
        )
    if peak <= _SILENCE:
        raise ParameterError(
            _FILE,
            f"it is silent: its largest sample is {peak:.2g}, and must be above {_SILENCE:g}; send a louder audio",
            reason="INVALID_MEDIA",
        )
    return Voice(
        name=body.name,
        created_s=int(time.time()),
        media_type=media_type,
        duration_s=round(duration_s, 3),
        ref_text=body.ref_text or None,
        consent=body.consent or None,
    )


def _check_name(name: str, models: Sequence[Model]) -> None:
    if not is_voice_name(name):
        raise ParameterError(
            "name",
            f"{name[:140]!r} cannot be the name of a voice; use 1 to 64 letters, digits, spaces and ._- of ASCII, with "
            "a letter or a digit first, and neither a space nor a dot last",
        )
    for model in models:
        if name in model.voices:
            raise ExistsError(f"the model {model.id!r} has a voice {name!r}; use another name", reason="VOICE_EXISTS")


async def _call(connection: HTTPConnection, method: Callable[[VoiceStore, str], T], default: T) -> T:
    """Returns the result of a method that is called with the store and the caller's name, or `default` without a store.

    Raises the errors of `Catalog.owner` and `call_store`.
    """
    store: VoiceStore | None = connection.app.state.voices
    if store is None:
        return default
    owner = await (await catalog_of(connection)).owner()
    return await call_store(lambda: method(store, owner), what="voices", executor=_THREADS)


async def _created(request: Request) -> list[Voice]:
    return await _call(request, VoiceStore.list_voices, [])


async def _built_in(request: Request) -> dict[str, dict[str, Any]]:
    """Returns the voices of the models that can be reached, by name."""
    ids = defaultdict[str, list[str]](list)
    for model in await (await catalog_of(request)).models():
        for name in model.voices:
            ids[name].append(model.id)
    return {
        name: {"id": name, "object": _OBJECT, "name": name, "type": "built_in", "models": models}
        for name, models in ids.items()
    }


def _to_object(voice: Voice) -> dict[str, Any]:
    return {
        "id": voice.name,
        "object": _OBJECT,
        "name": voice.name,
        "type": "audio_sample",
        "created_at": voice.created_s,
        "mime_type": voice.media_type,
        "duration": voice.duration_s,
        "ref_text": voice.ref_text,
        "consent": voice.consent,
    }


def _unknown(voice_id: str) -> NotFoundError:
    return NotFoundError(
        f"no voice has the id {voice_id[:140]!r}; list the voices by GET /v1/audio/voices", reason="UNKNOWN_VOICE"
    )
