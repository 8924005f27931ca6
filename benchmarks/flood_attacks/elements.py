"""Messages of the maximum size that consist of empty elements: cheap to send, and expensive to walk."""

import io
import json
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import av
import numpy as np
from google.protobuf.descriptor import Descriptor

from stagemesh.v1.jobs_pb2 import SubmitJobRequest
from stagemesh.v1.media_pb2 import UploadMediaRequest
from stagemesh.v1.orchestrator_pb2 import GenerateRequest
from stagemesh.v1.request_pb2 import Media
from stagemesh.v1.stage_pb2 import ExecuteStepRequest

_MESSAGE_BYTES = (8 << 20) - 1024
_JSON_BYTES = 1_000_000
_AUDIO_RATE_HZ = 8_000
_AUDIO_S = 20 * 3600
_BLOCK_SAMPLES = 65_535
"""The largest block of FLAC. Each block of silence takes the same number of bytes."""
_LENGTH_DELIMITED = 2
_Path: TypeAlias = tuple[str, ...]
"""The names of a field and of the fields around it, the outermost first."""


def grpc_calls(target: str) -> Mapping[str, Sequence[bytes]]:
    """Returns the messages with which to flood a process, by the path of their RPC."""
    conversation: _Path = ("input", "conversation", "messages")
    paths: Sequence[_Path]
    if target == "orchestrator":
        paths = (conversation, ("parameters", "sampling", "stop"), ("next_positions",), ("outputs",))
        return {"OrchestratorService/Generate": [_elements(GenerateRequest.DESCRIPTOR, path) for path in paths]}
    if target == "stage":
        paths = (conversation, ("inputs",), ("outputs",), ("input", "media"))
        return {"StageService/ExecuteStep": [_elements(ExecuteStepRequest.DESCRIPTOR, path) for path in paths]}
    if target == "jobs":
        paths = (("request", *conversation), ("request", "outputs"))
        return {"JobService/SubmitJob": [_elements(SubmitJobRequest.DESCRIPTOR, path) for path in paths]}
    # A message of this service has no elements, but an upload has many messages: the first one, and then empty ones.
    return {
        "MediaService/UploadMedia": [UploadMediaRequest(media=Media(media_type="image/png")).SerializeToString(), b""]
    }


def _elements(descriptor: Descriptor, path: _Path) -> bytes:
    """Returns a message whose repeated field at `path` has as many empty elements as fit."""
    numbers = list[int]()
    for name in path:
        field = descriptor.fields_by_name[name]
        numbers.append(field.number)
        if field.message_type is not None:
            descriptor = field.message_type
    *outer, last = (_varint(number << 3 | _LENGTH_DELIMITED) for number in numbers)
    element = last + b"\0"
    data = element * (_MESSAGE_BYTES // len(element))
    for tag in reversed(outer):
        data = tag + _varint(len(data)) + data
    return data


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*data, value])


def json_bodies() -> Sequence[bytes]:
    """Returns bodies for chat completions whose lists have wrong, empty, and valid elements."""
    valid = {"model": "flooded", "messages": [{"role": "user", "content": "hi"}]}
    lists: Mapping[str, object] = {"messages": 0, "tools": {}, "stop": "a", "stop_token_ids": None}
    return [json.dumps({**valid, name: _filled(element)}).encode() for name, element in lists.items()]


def realtime_events() -> Sequence[str]:
    """Returns events of realtime conversations with such lists."""
    item = {"type": "message", "role": "user", "content": _filled(0)}
    events = (
        {"type": "conversation.item.create", "item": item},
        {"type": "response.create", "response": {"input": _filled({})}},
        {"type": "session.update", "session": {"type": "realtime", "tools": _filled(None)}},
    )
    return [json.dumps(event) for event in events]


def _filled(element: object) -> Sequence[object]:
    return [element] * (_JSON_BYTES // len(json.dumps([element])))


def long_audio() -> bytes:
    """Returns a form that asks for the transcription of a FLAC file: hours of silence in less than a megabyte."""
    file = io.BytesIO()
    with av.open(file, "w", format="flac") as container:
        options = {"frame_size": str(_BLOCK_SAMPLES)}
        stream = container.add_stream("flac", rate=_AUDIO_RATE_HZ, layout="mono", format="s16", options=options)
        silence = av.AudioFrame.from_ndarray(np.zeros((1, _BLOCK_SAMPLES), np.int16), format="s16", layout="mono")
        silence.sample_rate = _AUDIO_RATE_HZ
        for number in range(_AUDIO_S * _AUDIO_RATE_HZ // _BLOCK_SAMPLES):
            silence.pts = number * _BLOCK_SAMPLES
            container.mux(stream.encode(silence))
        container.mux(stream.encode(None))
    head = b'--b\r\nContent-Disposition: form-data; name="%s"%s\r\n\r\n%s\r\n'
    fields = {b"model": b"flooded", b"response_format": b"verbose_json"}
    parts = [head % (name, b"", value) for name, value in fields.items()]
    return b"".join((*parts, head % (b"file", b'; filename="long.flac"', file.getvalue()), b"--b--\r\n"))
