"""The construction of a GenerateRequest from the arguments of `generate`: text, media, tokens and tensors.

All arguments are checked before anything is sent.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any, Literal, TypeAlias, TypedDict
from uuid import uuid4

import numpy as np
import numpy.typing as npt

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.tensors import Tensors, inline_tensor
from stagemesh.common.typed_values import Value, to_messages
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.v1 import orchestrator_pb2, request_pb2

_PROMPTS = ("messages", "raw_text", "token_ids")
_STRUCTURES = ("json_schema", "regex", "allowed_texts", "grammar")
OptionValue: TypeAlias = Value
"""The value of an option: a number, an integer, a flag or a text."""


@dataclass(frozen=True)
class _MediaFile:
    data: bytes
    media_type: str
    """The data's media type, for example "image/png", "audio/wav" or "video/mp4"."""


class ImageFile(_MediaFile):
    """An encoded image, for example the content of a PNG file."""


class AudioFile(_MediaFile):
    """Encoded audio, for example the content of a WAV file."""


@dataclass(frozen=True)
class VideoFile(_MediaFile):
    """An encoded video, for example the content of an MP4 file."""

    use_audio_in_video: bool = False
    """Whether the video's audio track belongs to the input. If false, the track is ignored."""


@dataclass(frozen=True, eq=False)
class AudioSamples:
    """Unencoded audio: float32 samples in [-1, 1], with shape [samples] or [samples, channels]."""

    samples: npt.NDArray[np.float32]
    sample_rate_hz: int


@dataclass(frozen=True)
class MediaFile:
    """An image, audio or video file in an object store: one that `upload` or an output returned, or another one to
    which the pipeline lets requests refer.
    """

    uri: str
    media_type: str
    """The file's media type, for example "image/png". It determines the kind of medium; "image/gif" is an image."""
    size_bytes: int = 0
    """The size of the file in bytes, or 0 if it is not known. The stage compares it with the file."""
    sha256: bytes = b""
    """The SHA-256 digest of the file, or empty if it is not known. The stage compares it with the file."""
    use_audio_in_video: bool = False
    """Whether the audio track of a video belongs to the input. If false, the track is ignored."""


Medium: TypeAlias = ImageFile | AudioFile | VideoFile | AudioSamples | MediaFile
"""An image, audio or a video."""
Part: TypeAlias = str | Medium
"""One part of a prompt or of a message: text, or an image, audio or video."""
Content: TypeAlias = str | Sequence[Part]
"""The content of a prompt or of a message: text, or a sequence of text and media in the model's reading order."""

JsonObject: TypeAlias = Mapping[str, object] | str
"""A JSON object: a mapping, or its JSON text."""


@dataclass(frozen=True)
class Tool:
    """A function that the model may call, with the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: JsonObject = ""


@dataclass(frozen=True)
class ToolCall:
    """The model's call of a tool. The result of the call refers to its id."""

    id: str
    name: str
    arguments: JsonObject = ""


@dataclass(frozen=True)
class Message:
    """A message of a conversation. `role` is "system", "developer", "user", "assistant" or "tool"."""

    role: str
    content: Content = ""
    tool_calls: Sequence[ToolCall] = ()
    """The tool calls of an assistant's message."""
    tool_call_id: str = ""
    """The id of the tool call of which a tool's message is the result."""


Conversation: TypeAlias = Sequence[Message | tuple[str, Content]]
"""A conversation: a sequence of messages, oldest first. A pair of a role and its content stands for a `Message`."""


class SamplingArguments(TypedDict, total=False):
    """The arguments that control how language models choose tokens. `request.proto` defines each argument.

    An omitted argument has the stage's default value.
    """

    max_tokens: int | None
    temperature: float | None
    """The sampling temperature. At 0, the most probable token is always selected."""
    top_p: float | None
    top_k: int | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    stop: Sequence[str]
    """Stop sequences. Generation ends as soon as the model has generated any of these strings."""
    stop_token_ids: Sequence[int]
    min_tokens: int | None
    ignore_eos: bool
    bad_words: Sequence[str]
    logprobs: int | None
    """The number of most probable tokens to report for each position, with their log-probabilities.

    The log-probability of the generated token is always reported in addition. 0 reports only the generated token. None
    reports no log-probabilities.
    """
    json_schema: str | Mapping[str, object] | None
    """The JSON schema to which the output must conform.

    At most one of json_schema, regex, allowed_texts and grammar may be set.
    """
    regex: str | None
    allowed_texts: Sequence[str] | None
    grammar: str | None


class StageArguments(SamplingArguments, total=False):
    """The parameters of one stage. They take precedence over the parameters of the whole request."""

    options: Mapping[str, OptionValue]
    """The values of options that the stage declares, by option name."""
    adapter: str | None
    """The name of the stage's LoRA adapter. An empty name selects no adapter."""
    chunk: int | Literal["whole"]
    """The number of frames in the first chunk that the stage receives, or "whole" for a single chunk at the end.

    Only for stages that receive chunks of frames. If it is omitted, the pipeline file determines the chunks.
    """


class GenerateArguments(SamplingArguments, total=False):
    """The arguments of `generate` in addition to the prompt. An omitted argument has the server's default value."""

    messages: Conversation
    """A conversation to send instead of a prompt."""
    tools: Sequence[Tool]
    """The tools that the model may call. They require a prompt of text and media, or messages."""
    template_arguments: JsonObject
    """Arguments of the model's chat template. They require a prompt of text and media, or messages."""
    raw_text: str
    """Text to which no chat template is applied, to send instead of a prompt."""
    token_ids: Sequence[int]
    """Token ids in the model's vocabulary, to send instead of a prompt."""
    media: Sequence[Medium]
    """The media to which the placeholders in `raw_text` or `token_ids` refer, in order."""
    negative_prompt: str
    """A description of content that images or videos must not show."""
    tensors: Tensors
    """Input tensors by name, for pipelines that accept tensors."""
    outputs: Sequence[str]
    """The names of the outputs to produce. An empty sequence produces all outputs."""
    adapter: str | None
    """The name of a LoRA adapter for the pipeline's main stage. None selects no adapter."""
    seed: int | None
    """The random seed, from 0 to 2**63 - 1. If it is omitted or None, the server chooses a random seed.

    The event `Admitted` contains the seed.
    """
    choices: int
    """The number of times to run the request, each time with the next seed. If it is omitted, the request runs once.

    `Result.choices` contains the outputs of each run. The `index` of an event is that of its choice, from 0.
    """
    options: Mapping[str, OptionValue]
    """The values of options that the pipeline's stages declare, by option name."""
    stages: Mapping[str, StageArguments]
    """The parameters of single stages, by stage name. All others mean the pipeline's main stage, except `options`.

    `options` apply to every stage that declares them.
    """
    request_id: str | None
    """The id that identifies the request in every service and log.

    None stands for an id that is generated at random.
    """
    pipeline: str
    """The name of the pipeline. May be omitted if the server has only one pipeline."""
    priority: int
    """The request's priority, from -10 to 10. Requests with higher priority leave the admission queue first."""
    caller: str
    """The caller's name. Callers whose requests have equal priority share the pipeline and its queue equally."""


_SUFFIXES: Mapping[str, tuple[type[ImageFile | AudioFile | VideoFile], str]] = {
    ".png": (ImageFile, "image/png"),
    ".jpg": (ImageFile, "image/jpeg"),
    ".jpeg": (ImageFile, "image/jpeg"),
    ".webp": (ImageFile, "image/webp"),
    ".gif": (ImageFile, "image/gif"),
    ".bmp": (ImageFile, "image/bmp"),
    ".wav": (AudioFile, "audio/wav"),
    ".mp3": (AudioFile, "audio/mpeg"),
    ".flac": (AudioFile, "audio/flac"),
    ".ogg": (AudioFile, "audio/ogg"),
    ".aac": (AudioFile, "audio/aac"),
    ".m4a": (AudioFile, "audio/mp4"),
    ".mp4": (VideoFile, "video/mp4"),
    ".mov": (VideoFile, "video/quicktime"),
    ".webm": (VideoFile, "video/webm"),
    ".mkv": (VideoFile, "video/x-matroska"),
    ".avi": (VideoFile, "video/x-msvideo"),
}


def read_media(path: Path | str) -> ImageFile | AudioFile | VideoFile:
    """Returns the image, audio or video in a file. The suffix of the file name determines the kind and the media type.

    Raises InvalidRequestError (INVALID_MEDIA) if the suffix is unknown or the file cannot be read.
    """
    path = Path(path)
    media_type = media_type_of(path)
    kind = _SUFFIXES[path.suffix.lower()][0]
    try:
        return kind(path.read_bytes(), media_type)
    except OSError as exc:
        raise InvalidRequestError(f"cannot read {path}: {exc.strerror}", reason="INVALID_MEDIA") from exc


def media_type_of(path: PurePath) -> str:
    """Returns the media type of an image, audio or video file. The suffix of its name determines it.

    Raises InvalidRequestError (INVALID_MEDIA) if the suffix is unknown.
    """
    if path.suffix.lower() not in _SUFFIXES:
        raise InvalidRequestError(
            f"{path} has none of the suffixes of images, audio and video: {', '.join(_SUFFIXES)}",
            reason="INVALID_MEDIA",
        )
    return _SUFFIXES[path.suffix.lower()][1]


def build_request(prompt: Content | None, arguments: GenerateArguments) -> orchestrator_pb2.GenerateRequest:
    """Returns the request message for a prompt and the other arguments of `generate`.

    The message always has a request_id, so that it can safely be sent again. Raises InvalidRequestError if an argument
    is unknown, if protobuf cannot encode a value, if the arguments contradict each other, or if the message is too
    large.
    """
    _check_names(arguments, GenerateArguments)
    try:
        request = orchestrator_pb2.GenerateRequest(
            request_id=arguments.get("request_id") or uuid4().hex,
            pipeline=arguments.get("pipeline", ""),
            input=_input(prompt, arguments),
            parameters=request_pb2.Parameters(
                seed=arguments.get("seed"),
                sampling=_sampling(arguments),
                options=to_messages(arguments.get("options", {})),
                adapter=arguments.get("adapter"),
                stages={name: _stage(name, given) for name, given in arguments.get("stages", {}).items()},
                choices=arguments.get("choices"),
            ),
            outputs=arguments.get("outputs", ()),
            priority=arguments.get("priority", 0),
            caller=arguments.get("caller", ""),
        )
    except (ValueError, TypeError) as exc:
        raise InvalidRequestError(f"an argument of generate cannot be sent: {exc}") from exc
    _check_size(request)
    return request


def _input(prompt: Content | None, arguments: GenerateArguments) -> request_pb2.Input:
    given = [name for name in _PROMPTS if name in arguments] + ["prompt"] * (prompt is not None)
    if len(given) > 1:
        raise InvalidRequestError(f"{' and '.join(given)} are given; a request accepts only one of them")
    if not given and not arguments.get("tensors"):
        raise InvalidRequestError(f"the request has no input; give a prompt, {', '.join(_PROMPTS)} or tensors")
    message = request_pb2.Input(
        conversation=_conversation(prompt, arguments),
        token_ids=request_pb2.TokenIds(ids=arguments["token_ids"]) if "token_ids" in arguments else None,
        media=[_part(medium) for medium in arguments.get("media", ())],
        negative_prompt=arguments.get("negative_prompt", ""),
        tensors=[inline_tensor(name, tensor) for name, tensor in arguments.get("tensors", {}).items()],
    )
    if "raw_text" in arguments:
        message.raw_text = arguments["raw_text"]
    if isinstance(prompt, str) and not message.HasField("conversation"):
        message.text = prompt
    return message


def _conversation(prompt: Content | None, arguments: GenerateArguments) -> request_pb2.Conversation | None:
    """Returns the conversation to send, or None if the prompt is text alone, raw text, token ids or absent."""
    tools, template_arguments = arguments.get("tools", ()), arguments.get("template_arguments", "")
    messages = list(arguments.get("messages", ()))
    if prompt is not None and (tools or template_arguments or not isinstance(prompt, str)):
        messages.append(Message("user", prompt))
    if not messages and "messages" not in arguments:
        if tools or template_arguments:
            raise InvalidRequestError("tools and template_arguments need a prompt or messages; give one of them")
        return None
    return request_pb2.Conversation(
        messages=[_message(each if isinstance(each, Message) else Message(*each)) for each in messages],
        tools=[
            request_pb2.Tool(name=tool.name, description=tool.description, parameters=_json(tool.parameters))
            for tool in tools
        ],
        template_arguments=_json(template_arguments),
    )


def _check_size(request: orchestrator_pb2.GenerateRequest) -> None:
    size_bytes = request.ByteSize()
    if size_bytes > MAX_MESSAGE_BYTES:
        raise InvalidRequestError(
            f"the request is {size_bytes} bytes long; the limit is {MAX_MESSAGE_BYTES}; shorten the input, or upload "
            "its media",
            reason="MESSAGE_TOO_LARGE",
            metadata={"size_bytes": str(size_bytes), "limit_bytes": str(MAX_MESSAGE_BYTES)},
        )


def _sampling(arguments: SamplingArguments) -> request_pb2.Sampling:
    names = SamplingArguments.__annotations__.keys()
    given: dict[str, Any] = {key: value for key, value in arguments.items() if key in names and value is not None}
    structures = [name for name in _STRUCTURES if name in given]
    if len(structures) > 1:
        raise InvalidRequestError(f"{' and '.join(structures)} are given; an output can have only one structure")
    if not isinstance(given.get("json_schema", ""), str):
        given["json_schema"] = json.dumps(given["json_schema"])
    if "allowed_texts" in given:
        given["allowed_texts"] = request_pb2.AllowedTexts(texts=given["allowed_texts"])
    return request_pb2.Sampling(**given)


def _check_names(given: Mapping[str, object], kind: type[SamplingArguments], *, of: str = "") -> None:
    unknown = given.keys() - kind.__annotations__.keys()
    if unknown:
        raise InvalidRequestError(
            f"unknown argument{of}: {', '.join(sorted(unknown))}; options that a stage declares belong into `options`"
        )


def _stage(name: str, given: StageArguments) -> request_pb2.StageParameters:
    _check_names(given, StageArguments, of=f" of stage {name}")
    return request_pb2.StageParameters(
        sampling=_sampling(given),
        options=to_messages(given.get("options", {})),
        adapter=given.get("adapter"),
        chunk=_chunk(given["chunk"]) if "chunk" in given else None,
    )


def _chunk(given: int | str) -> request_pb2.ChunkParameters:
    if isinstance(given, int):
        return request_pb2.ChunkParameters(initial_frames=given)
    if given != "whole":
        raise InvalidRequestError(f'chunk is {given!r}; give the number of frames of the first chunk, or "whole"')
    return request_pb2.ChunkParameters(whole=True)


def _message(message: Message) -> request_pb2.Message:
    role = f"ROLE_{message.role.upper()}"
    if role not in request_pb2.Role.keys()[1:]:
        roles = ", ".join(name.removeprefix("ROLE_").lower() for name in request_pb2.Role.keys()[1:])
        raise InvalidRequestError(f"a message's role is {message.role!r}; use one of {roles}", reason="INVALID_PROMPT")
    return request_pb2.Message(
        role=request_pb2.Role.Value(role),
        content=message.content if isinstance(message.content, str) else "",
        parts=() if isinstance(message.content, str) else [_part(part) for part in message.content],
        tool_calls=[
            request_pb2.ToolCall(id=call.id, name=call.name, arguments=_json(call.arguments))
            for call in message.tool_calls
        ],
        tool_call_id=message.tool_call_id,
    )


def _json(value: JsonObject) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _part(part: Part) -> request_pb2.Part:
    match part:
        case str():
            return request_pb2.Part(text=part)
        case ImageFile():
            return request_pb2.Part(image=request_pb2.MediaFile(data=part.data, media_type=part.media_type))
        case AudioFile():
            return request_pb2.Part(audio_file=request_pb2.MediaFile(data=part.data, media_type=part.media_type))
        case VideoFile():
            video = request_pb2.MediaFile(data=part.data, media_type=part.media_type)
            return request_pb2.Part(video_file=video, use_audio_in_video=part.use_audio_in_video)
        case MediaFile():
            return _stored_part(part)
        case AudioSamples():
            samples = inline_tensor("samples", np.asarray(part.samples, np.float32))
            return request_pb2.Part(audio=request_pb2.Audio(samples=samples, sample_rate_hz=part.sample_rate_hz))


def _stored_part(file: MediaFile) -> request_pb2.Part:
    message = request_pb2.MediaFile(
        uri=file.uri, media_type=file.media_type, size_bytes=file.size_bytes, sha256=file.sha256
    )
    match file.media_type.partition("/")[0]:
        case "image":
            return request_pb2.Part(image=message)
        case "audio":
            return request_pb2.Part(audio_file=message)
        case "video":
            return request_pb2.Part(video_file=message, use_audio_in_video=file.use_audio_in_video)
        case _:
            raise InvalidRequestError(
                f"the media type of {file.uri} is {file.media_type!r}; a prompt accepts images, audio and video",
                reason="INVALID_MEDIA",
            )
