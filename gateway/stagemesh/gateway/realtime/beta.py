"""The realtime API as it was before its general availability: other names of events, and settings without nesting."""

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from starlette.websockets import WebSocket

from stagemesh.gateway.body import Object

Event: TypeAlias = dict[str, Any]

_DONE, _ADDED, _CREATED = (f"conversation.item.{change}" for change in ("done", "added", "created"))
_CONTENTS = {"output_text": "text", "output_audio": "audio"}
_SETTINGS: Mapping[str, tuple[str, ...]] = {
    "modalities": ("output_modalities",),
    "max_response_output_tokens": ("max_output_tokens",),
    "input_audio_format": ("audio", "input", "format"),
    "input_audio_noise_reduction": ("audio", "input", "noise_reduction"),
    "input_audio_transcription": ("audio", "input", "transcription"),
    "turn_detection": ("audio", "input", "turn_detection"),
    "output_audio_format": ("audio", "output", "format"),
    "speed": ("audio", "output", "speed"),
    "voice": ("audio", "output", "voice"),
}
"""The path of a setting by its beta name."""
_FORMAT_SETTINGS = ("input_audio_format", "output_audio_format")
_FORMATS = {"pcm16": "audio/pcm", "g711_ulaw": "audio/pcmu", "g711_alaw": "audio/pcma"}
_FORMAT_NAMES = {name: beta for beta, name in _FORMATS.items()}


def offers_beta(websocket: WebSocket) -> bool:
    """Returns whether a client asks for the beta when it connects."""
    offered = "openai-beta.realtime-v1" in websocket.scope["subprotocols"]
    return offered or "realtime=v1" in websocket.headers.get("openai-beta", "")


def is_beta(settings: Object) -> bool:
    """Returns whether settings have a name of the beta."""
    return not _SETTINGS.keys().isdisjoint(settings)


def from_beta(settings: Object) -> dict[str, Any]:
    """Returns settings with today's names. Retains those that have the same name, and replaces no others."""
    nested: dict[str, Any] = {}
    for name in _SETTINGS.keys() & settings.keys():
        value, place, (*path, last) = settings[name], nested, _SETTINGS[name]
        for step in path:
            place = place.setdefault(step, {})
        is_format = name in _FORMAT_SETTINGS and isinstance(value, str)
        place[last] = {"type": _FORMATS.get(value, value)} if is_format else value
    return {**nested, **{name: value for name, value in settings.items() if name not in _SETTINGS}}


def to_beta(event: Event) -> Event | None:
    """Returns an event as a client of the beta knows it, or None if it knows no such event."""
    if (name := event["type"]) == _DONE:
        return None
    if name.startswith(("response.output_audio", "response.output_text")):
        name = name.replace("output_", "", 1)
    changed = {**event, "type": _CREATED if name == _ADDED else name}
    for field, convert in (("item", _item), ("session", _flat), ("response", _flat)):
        if field in event:
            changed[field] = convert(event[field])
    return changed


def _item(item: Event) -> Event:
    contents = [{**each, "type": _CONTENTS.get(each["type"], each["type"])} for each in item.get("content", ())]
    return {**item, "content": contents} if contents else item


def _flat(given: Object) -> Event:
    """Returns a session or a response with the beta's names of settings."""
    flat = {name: value for name, value in given.items() if name not in {"audio", "output_modalities"}}
    for name, path in _SETTINGS.items():
        value: Any = given
        for step in path:
            value = cast("Object", value).get(step) if isinstance(value, dict) else None
        flat[name] = _FORMAT_NAMES[value["type"]] if name in _FORMAT_SETTINGS and value else value
    if "output" in given:
        flat["output"] = [_item(each) for each in given["output"]]
    return flat
