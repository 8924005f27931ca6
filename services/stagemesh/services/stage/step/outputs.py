"""The outputs of a step, which are sent to its caller unchanged, or encoded as files that are sent or stored."""

import asyncio
import codecs
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from stagemesh.common.errors import UnsupportedError
from stagemesh.common.media.encodings import RAW, Buffer, Encoder, make_encoder
from stagemesh.common.media.files import MEDIA_PART_BYTES
from stagemesh.common.media.store import MediaStore
from stagemesh.common.media.stored_file import StoredFileWriter
from stagemesh.common.plugins.descriptors import Emitted
from stagemesh.common.wire.tensors import Array, as_bytes, inline_tensor
from stagemesh.connectors.packets import Packet
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.services.engines.base import Emission, Finish, MessageDelta, Progress, TokenLogprobs
from stagemesh.services.stage.step.spec import StreamedOutput
from stagemesh.v1 import request_pb2, stage_pb2

# The other fields of a message also need space.
_MAX_TENSOR_BYTES = MAX_MESSAGE_BYTES - (64 << 10)
PROGRESS_INTERVAL_S, STEPS_INTERVAL_S = 0.5, 0.05
"""The shortest time between two progress reports of a step in seconds: in general, and if the total number of steps is
known. A display need not change more often, and a message takes as long as a part of a short step."""
_MAGIC_BYTES = 4
_MEDIA_TYPES: Mapping[bytes, str] = {b"\x89PNG": "image/png", b"\xff\xd8\xff": "image/jpeg", b"RIFF": "image/webp"}


class StreamedOutputs:
    """Splits the emissions of one run into parts of outputs. Covers only the requested outputs that are neither encoded
    nor stored.

    Each part is an event for the caller. The event contains a copy of the data, because a view could retain a lease on
    another replica's arena.
    """

    def __init__(
        self,
        names: Sequence[str],
        emits: Mapping[str, Emitted],
        *,
        made: Mapping[str, int] | None = None,
        parsed: Collection[str] = (),
    ) -> None:
        """`names` are the outputs that the caller requested, and `emits` describes the outputs that the stage can emit,
        by name. `parsed` are the names of the outputs for which a message may replace the text.

        `made` contains the length of each output that earlier runs of the request have emitted, by output name. The
        positions continue from there. None means that there was no earlier run.
        """
        self._emitted = {name: emits[name] for name in names}
        self._parsed = tuple(parsed)
        self._lengths = {name: (made or {}).get(name, 0) for name in names}
        self._counts: tuple[int, int] | None = None
        # An emission may end in the middle of a UTF-8 character.
        self._decoders = {name: codecs.getincrementaldecoder("utf-8")("replace") for name in names}

    @property
    def made(self) -> dict[str, int]:
        """The length of each output so far, by output name. Includes what earlier runs of the request have emitted."""
        return dict(self._lengths)

    @property
    def is_within_character(self) -> bool:
        """Whether a text was emitted up to the middle of a character. The decoders retain the beginning of it."""
        return any(decoder.getstate()[0] for decoder in self._decoders.values())

    def push(self, emission: Emission) -> list[stage_pb2.ExecuteStepResponse]:
        """Returns the parts that the tensors of an emission form. The message replaces the text in parsed outputs.

        Raises UnsupportedError if a tensor does not fit in one message.
        """
        packet, message, self._counts = emission.packet, emission.message, emission.counts or self._counts
        parsed = self._parsed if message is not None else ()
        parts = [self._message(name, delta) for name in parsed for delta in message or ()]
        for name, emitted in self._emitted.items():
            tensor = packet.tensors.get(name)
            if tensor is None or not tensor.size or name in parsed:
                continue
            match emitted.kind:
                case "text":
                    if text := self._decoders[name].decode(tensor.tobytes()):
                        parts.append(self._text(name, text, emission.text_logprobs))
                case "tokens":
                    parts.append(self._tokens(name, tensor, emission.logprobs))
                case "audio":
                    parts += self._audio(name, tensor, emitted.sample_rate_hz)
                case "image":
                    parts += self._image(name, tensor, preview=_is_preview(packet))
                case "media":
                    parts += self._media(name, tensor, emitted.media_type)
                case "tensor":
                    parts.append(self._whole(name, tensor))
        return parts

    def finish(self, finish: Finish | None) -> Iterator[stage_pb2.ExecuteStepResponse]:
        """Yields the last part of each output. If `finish` is None, because the run pauses, yields only remaining text.

        The bytes of an incomplete UTF-8 character are decoded as the replacement character U+FFFD.
        """
        for name, decoder in self._decoders.items():
            text = decoder.decode(b"", final=True)
            if not text and finish is None:
                continue
            part = self._next(name, len(text.encode()))
            if text:
                part.output.text = text
            if finish is not None:
                part.output.finish.CopyFrom(finish_to_wire(finish))
                if self._emitted[name].kind == "media" and self._lengths[name]:
                    media = part.output.media
                    media.media_type = self._emitted[name].media_type
                    media.offset, media.last = self._lengths[name], True
            yield part

    def _text(self, name: str, text: str, logprobs: Sequence[TokenLogprobs]) -> stage_pb2.ExecuteStepResponse:
        part = self._next(name, len(text.encode()))
        part.output.text = text
        if logprobs:
            part.output.logprobs.extend(logprobs_to_wire(logprobs))
        return part

    def _message(self, name: str, delta: MessageDelta) -> stage_pb2.ExecuteStepResponse:
        part = self._next(name, delta.length)
        if delta.kind == "tool_call":
            call = request_pb2.ToolCallDelta(index=delta.call, id=delta.id, name=delta.name, arguments=delta.text)
            part.output.message.tool_call.CopyFrom(call)
        else:
            setattr(part.output.message, delta.kind, delta.text)
        part.output.logprobs.extend(logprobs_to_wire(delta.logprobs))
        return part

    def _tokens(self, name: str, ids: Array, logprobs: Sequence[TokenLogprobs]) -> stage_pb2.ExecuteStepResponse:
        part = self._next(name, len(ids))
        part.output.token_ids.ids.extend(ids.tolist())
        part.output.logprobs.extend(logprobs_to_wire(logprobs))
        return part

    def _audio(self, name: str, samples: Array, sample_rate_hz: int) -> Iterator[stage_pb2.ExecuteStepResponse]:
        """Yields parts of the audio samples that fit in a message."""
        step = max(1, MEDIA_PART_BYTES * len(samples) // max(1, samples.nbytes))
        for start in range(0, len(samples), step):
            part = self._next(name, len(samples[start : start + step]))
            part.output.audio.samples.CopyFrom(inline_tensor(name, samples[start : start + step]))
            part.output.audio.sample_rate_hz = sample_rate_hz
            yield part

    def _image(self, name: str, file: Array, *, preview: bool) -> Iterator[stage_pb2.ExecuteStepResponse]:
        for media in _media_parts(as_bytes(file), media_type=_image_type_of(file), preview=preview):
            part = self._next(name, int(media.last))
            part.output.image.CopyFrom(media)
            yield part

    def _media(self, name: str, data: Array, media_type: str) -> Iterator[stage_pb2.ExecuteStepResponse]:
        offset = self._lengths[name]
        for media in _media_parts(as_bytes(data), media_type=media_type, offset=offset, last=False):
            part = self._next(name, len(media.data))
            part.output.media.CopyFrom(media)
            yield part

    def _whole(self, name: str, tensor: Array) -> stage_pb2.ExecuteStepResponse:
        if tensor.nbytes > _MAX_TENSOR_BYTES:
            raise UnsupportedError(
                f"output {name} has {tensor.nbytes} bytes, but at most {_MAX_TENSOR_BYTES} can be sent to a client; "
                "request another output or a smaller one, or store it (`stored: true` in the pipeline file)",
                reason="OUTPUT_TOO_LARGE",
            )
        part = self._next(name, len(tensor) if tensor.ndim else 1)
        part.output.tensor.CopyFrom(inline_tensor(name, tensor))
        return part

    def _next(self, name: str, length: int) -> stage_pb2.ExecuteStepResponse:
        """Returns an event with the next part of the output `name`. The caller adds the data, `length` units, in place.

        Building the output separately and then copying it would be slower, and every generated token requires a part.
        """
        part, position = stage_pb2.ExecuteStepResponse(), self._lengths[name]
        output = part.output
        output.name, output.position = name, position
        if self._counts is not None:
            output.prompt_tokens, output.output_tokens = self._counts
        self._lengths[name] = position + length
        return part


def finish_to_wire(finish: Finish) -> request_pb2.Finish:
    """Converts the reason why a task's outputs end to its protobuf message."""
    message = request_pb2.Finish(reason=request_pb2.FinishReason.Value(f"FINISH_REASON_{finish.reason.upper()}"))
    if finish.stop_text is not None:
        message.stop_text = finish.stop_text
    elif finish.stop_token_id is not None:
        message.stop_token_id = finish.stop_token_id
    return message


class ProgressThrottle:
    """Limits progress reports to one per PROGRESS_INTERVAL_S seconds, or to one per STEPS_INTERVAL_S seconds if the
    total number of steps is known. The last of a known number of steps is always reported.

    An engine reports progress for each token or denoising step. Without the limit, progress reports would double the
    number of messages.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._reported_s = -math.inf

    def is_due(self, progress: Progress) -> bool:
        """Returns whether to report this progress to the caller. Skipped progress is superseded by a later report or by
        the end of the step.
        """
        now_s = self._clock()
        interval_s = PROGRESS_INTERVAL_S if progress.total_steps is None else STEPS_INTERVAL_S
        if progress.steps != progress.total_steps and now_s - self._reported_s < interval_s:
            return False
        self._reported_s = now_s
        return True


def logprobs_to_wire(logprobs: Sequence[TokenLogprobs]) -> Iterator[request_pb2.TokenLogprobs]:
    """Converts log-probabilities to their protobuf messages."""
    for each in logprobs:
        top = (request_pb2.TokenLogprob(**token._asdict()) for token in each.top)
        sampled = request_pb2.TokenLogprob(**each.sampled._asdict())
        yield request_pb2.TokenLogprobs(sampled=sampled, top=top, position=each.position)


def _is_preview(packet: Packet) -> bool:
    """Returns whether the image in a packet shows an earlier state of a later image."""
    return bool(packet.metadata.get("preview"))


def _image_type_of(file: Array) -> str:
    """Returns the media type of an encoded image, which its first bytes determine."""
    begin = file[:_MAGIC_BYTES].tobytes()
    return next((media_type for magic, media_type in _MEDIA_TYPES.items() if begin.startswith(magic)), RAW)


def _media_parts(
    data: bytes | memoryview, *, media_type: str, offset: int = 0, last: bool = True, preview: bool = False
) -> Iterator[request_pb2.Media]:
    """Yields a part of a file as messages with at most 1 MiB of bytes each.

    - `offset` is the number of bytes of the file before this part.
    - `last` is True if this part ends the file. The last message then has `last` set. It may have no bytes.
    """
    for start in range(0, max(len(data), int(last)), MEDIA_PART_BYTES):
        end = start + MEDIA_PART_BYTES
        yield request_pb2.Media(
            media_type=media_type,
            data=bytes(data[start:end]),
            offset=offset + start,
            last=last and end >= len(data),
            preview=preview,
        )


class FileOutputs:
    """Encodes and stores the outputs of one run that are files.

    The run awaits each method. A slow store therefore delays only the run's own engine task. `push` retains no tensor.
    Call `discard` unless `commit` has succeeded.
    """

    def __init__(
        self, wanted: Sequence[StreamedOutput], emits: Mapping[str, Emitted], *, store: MediaStore | None
    ) -> None:
        """Raises UnsupportedError if an output has a URI and `store` is None.

        - `wanted` contains the outputs that are files.
        - `emits` describes the stage's outputs by name.
        - `store` is the store in which outputs with a URI are stored, or None if the stage has none.
        """
        self._wanted, self._emits = wanted, emits
        self._stores = {each.tensor: _store_for(each, store) for each in wanted if each.uri}
        self._sent: list[_SentFile] = []
        self._stored: list[_StoredFile | _StoredImages] = []

    async def open(self) -> None:
        """Prepares the files. A store that cannot be written to therefore fails the run before the engine computes.

        Raises the errors of `MediaStore.create`, and NotReadyError (MISSING_MODULE) if a package for an encoding is not
        installed.
        """
        for each in self._wanted:
            emitted, store = self._emits[each.tensor], self._stores.get(each.tensor)
            if store is not None and emitted.kind == "image":
                self._stored.append(_StoredImages(each, store))
                continue
            # The encoders' library is loaded at the first use, which would block the event loop.
            encoder = await asyncio.to_thread(
                make_encoder, each.media_type, sample_rate_hz=emitted.sample_rate_hz, frame_rate=each.frame_rate or 0.0
            )
            if store is None:
                self._sent.append(_SentFile(each, encoder))
            else:
                writer = await store.create(each.uri, each.media_type or emitted.media_type)
                self._stored.append(_StoredFile(each.tensor, encoder, writer))

    async def push(self, packet: Packet) -> Sequence[request_pb2.Output]:
        """Adds a packet's tensors to the files, except previews. Returns the parts to send.

        Raises the errors of `StoredFileWriter.write`, and UnsupportedError (OUTPUT_NOT_ENCODABLE).
        """
        parts: list[request_pb2.Output] = []
        for file in (*self._sent, *self._stored):
            tensor = packet.tensors.get(file.name)
            if tensor is not None and tensor.size and not _is_preview(packet):
                parts += await file.push(tensor)
        return parts

    async def finish(self, finish: Finish) -> Sequence[request_pb2.Output]:
        """Completes the files. Returns the last parts of the files that are sent. Raises the errors of `push`."""
        for file in self._stored:
            await file.finish()
        return [part for file in self._sent for part in _ended(file.name, await file.finish(), finish)]

    async def commit(self, finish: Finish) -> Sequence[request_pb2.Output]:
        """Makes the stored files visible. Returns all parts of the stored outputs.

        Raises the errors of `StoredFileWriter.commit`.
        """
        parts: list[request_pb2.Output] = []
        for file in self._stored:
            files = await file.commit()
            stored = [request_pb2.Output(name=file.name, position=at, file=each) for at, each in enumerate(files)]
            parts += _ended(file.name, stored, finish)
        return parts

    async def discard(self) -> None:
        """Deletes the stored files, including committed ones. Never raises an error."""
        await asyncio.gather(*(file.discard() for file in self._stored))


class _SentFile:
    """An output that is encoded and sent while the stage emits it."""

    def __init__(self, wanted: StreamedOutput, encoder: Encoder) -> None:
        self.name, self._media_type, self._encoder = wanted.tensor, wanted.media_type, encoder
        self._sent_bytes = 0

    async def push(self, tensor: Array) -> Sequence[request_pb2.Output]:
        return self._parts(await asyncio.to_thread(self._encoder.push, tensor), last=False)

    async def finish(self) -> Sequence[request_pb2.Output]:
        rest = await asyncio.to_thread(self._encoder.finish)
        return self._parts(rest, last=True) if rest or self._sent_bytes else ()

    def _parts(self, data: Buffer, *, last: bool) -> Sequence[request_pb2.Output]:
        offset = self._sent_bytes
        self._sent_bytes += len(data)
        parts = _media_parts(data, media_type=self._media_type, offset=offset, last=last)
        return [request_pb2.Output(name=self.name, position=media.offset, media=media) for media in parts]


class _StoredFile:
    """An output that is stored as one file. Nothing is stored if the stage emits nothing."""

    def __init__(self, name: str, encoder: Encoder, writer: StoredFileWriter) -> None:
        self.name, self._encoder, self._writer = name, encoder, writer

    async def push(self, tensor: Array) -> Sequence[request_pb2.Output]:
        await self._write(await asyncio.to_thread(self._encoder.push, tensor))
        return ()

    async def finish(self) -> None:
        await self._write(await asyncio.to_thread(self._encoder.finish))

    async def commit(self) -> Sequence[request_pb2.MediaFile]:
        if not self._writer.size_bytes:
            await self.discard()
            return ()
        return [await self._writer.commit()]

    async def discard(self) -> None:
        await self._writer.discard()

    async def _write(self, data: Buffer) -> None:
        if data:
            await self._writer.write(data)


class _StoredImages:
    """An output whose images are stored, each as its own file."""

    def __init__(self, wanted: StreamedOutput, store: MediaStore) -> None:
        self._uri, self._store = wanted.uri, store
        self.name = wanted.tensor
        self._writers: list[StoredFileWriter] = []

    async def push(self, tensor: Array) -> Sequence[request_pb2.Output]:
        number = len(self._writers) + 1
        uri = self._uri if number == 1 else f"{self._uri}-{number}"
        self._writers.append(await self._store.create(uri, _image_type_of(tensor)))
        await self._writers[-1].write(as_bytes(tensor))
        return ()

    async def finish(self) -> None:
        """Does nothing, because each image is complete."""

    async def commit(self) -> Sequence[request_pb2.MediaFile]:
        return [await writer.commit() for writer in self._writers]

    async def discard(self) -> None:
        await asyncio.gather(*(writer.discard() for writer in self._writers))


def _store_for(wanted: StreamedOutput, store: MediaStore | None) -> MediaStore:
    if store is None or not store.config.store:
        raise UnsupportedError(
            f"output {wanted.tensor} cannot be stored, because this stage has no object store; set media.store in the "
            "pipeline file and restart the stage, or let the output be sent"
        )
    return store


def _ended(name: str, parts: Sequence[request_pb2.Output], finish: Finish) -> Sequence[request_pb2.Output]:
    """Returns the last parts of an output, with `finish` in the last one."""
    ended = [*parts] or [request_pb2.Output(name=name)]
    ended[-1].finish.CopyFrom(finish_to_wire(finish))
    return ended
