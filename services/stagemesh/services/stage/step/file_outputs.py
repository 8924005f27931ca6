"""The outputs of a step that are files: they are encoded, and sent while they are made, or stored as a whole."""

import asyncio
from collections.abc import Mapping, Sequence

from stagemesh.common.descriptors import Emitted
from stagemesh.common.errors import UnsupportedError
from stagemesh.common.media_encoders import Buffer, Encoder, make_encoder
from stagemesh.common.tensors import Array, as_bytes
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.base import Finish
from stagemesh.services.media.store import MediaStore
from stagemesh.services.media.stored_file import StoredFileWriter
from stagemesh.services.stage.step.outputs import finish_to_wire, image_type_of, is_preview, media_parts
from stagemesh.services.stage.step.spec import StreamedOutput
from stagemesh.v1 import request_pb2


class FileOutputs:
    """Encodes and stores the outputs of one run that are files.

    The run waits for each method, so that a slow store delays the run's engine task and nothing else. After `push`, no
    tensor is retained. Call `discard` unless `commit` has succeeded.
    """

    def __init__(
        self, wanted: Sequence[StreamedOutput], emits: Mapping[str, Emitted], *, store: MediaStore | None
    ) -> None:
        """Raises UnsupportedError if an output has a URI but there is no store.

        - `wanted` contains the outputs that are files.
        - `emits` describes the stage's outputs by name.
        - `store` is the store in which outputs with a URI are stored, or None if the stage has none.
        """
        self._sent = [_SentFile(each, emits[each.tensor]) for each in wanted if not each.uri]
        self._stored = [_stored_output(each, emits[each.tensor], store) for each in wanted if each.uri]

    async def open(self) -> None:
        """Prepares the files, so that a store that cannot be written to fails the run before the engine computes.

        Raises the errors of `MediaStore.create`, and NotReadyError (MISSING_MODULE) if a package for an encoding is not
        installed.
        """
        for file in (*self._sent, *self._stored):
            await file.open()

    async def push(self, packet: Packet) -> Sequence[request_pb2.Output]:
        """Adds a packet's tensors to the files, apart from previews. Returns the parts that are sent.

        Raises the errors of `StoredFileWriter.write`, and UnsupportedError (OUTPUT_NOT_ENCODABLE).
        """
        parts: list[request_pb2.Output] = []
        for file in (*self._sent, *self._stored):
            tensor = packet.tensors.get(file.name)
            if tensor is not None and tensor.size and not is_preview(packet):
                parts += await file.push(tensor)
        return parts

    async def finish(self, finish: Finish) -> Sequence[request_pb2.Output]:
        """Completes the files. Returns the last parts of those that are sent. Raises the errors of `push`."""
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
    """An output that is encoded, and sent while it is made."""

    def __init__(self, wanted: StreamedOutput, emitted: Emitted) -> None:
        self._wanted, self._emitted = wanted, emitted
        self.name = wanted.tensor
        self._encoder: Encoder
        self._sent_bytes = 0

    async def open(self) -> None:
        self._encoder = await _make_encoder(self._wanted, self._emitted)

    async def push(self, tensor: Array) -> Sequence[request_pb2.Output]:
        return self._parts(await asyncio.to_thread(self._encoder.push, tensor), last=False)

    async def finish(self) -> Sequence[request_pb2.Output]:
        rest = await asyncio.to_thread(self._encoder.finish)
        return self._parts(rest, last=True) if rest or self._sent_bytes else ()

    def _parts(self, data: Buffer, *, last: bool) -> Sequence[request_pb2.Output]:
        offset = self._sent_bytes
        self._sent_bytes += len(data)
        parts = media_parts(data, media_type=self._wanted.media_type, offset=offset, last=last)
        return [request_pb2.Output(name=self.name, position=media.offset, media=media) for media in parts]


class _StoredFile:
    """An output that is stored as one file. Nothing is stored if the stage emits nothing."""

    def __init__(self, wanted: StreamedOutput, emitted: Emitted, store: MediaStore) -> None:
        self._wanted, self._emitted, self._store = wanted, emitted, store
        self.name = wanted.tensor
        self._encoder: Encoder
        self._writer: StoredFileWriter | None = None

    async def open(self) -> None:
        media_type = self._wanted.media_type or self._emitted.media_type
        self._encoder = await _make_encoder(self._wanted, self._emitted)
        self._writer = await self._store.create(self._wanted.uri, media_type)

    async def push(self, tensor: Array) -> Sequence[request_pb2.Output]:
        await self._write(await asyncio.to_thread(self._encoder.push, tensor))
        return ()

    async def finish(self) -> None:
        await self._write(await asyncio.to_thread(self._encoder.finish))

    async def commit(self) -> Sequence[request_pb2.MediaFile]:
        assert self._writer is not None, "`open` has been called"
        if not self._writer.size_bytes:
            await self.discard()
            return ()
        return [await self._writer.commit()]

    async def discard(self) -> None:
        if self._writer is not None:
            await self._writer.discard()

    async def _write(self, data: Buffer) -> None:
        assert self._writer is not None, "`open` has been called"
        if data:
            await self._writer.write(data)


class _StoredImages:
    """An output whose images are stored, each as a file of its own."""

    def __init__(self, wanted: StreamedOutput, store: MediaStore) -> None:
        self._uri, self._store = wanted.uri, store
        self.name = wanted.tensor
        self._writers: list[StoredFileWriter] = []

    async def open(self) -> None:
        """Does nothing, because the number of images is not known."""

    async def push(self, tensor: Array) -> Sequence[request_pb2.Output]:
        number = len(self._writers) + 1
        uri = self._uri if number == 1 else f"{self._uri}-{number}"
        self._writers.append(await self._store.create(uri, image_type_of(tensor)))
        await self._writers[-1].write(as_bytes(tensor))
        return ()

    async def finish(self) -> None:
        """Does nothing, because each image is complete."""

    async def commit(self) -> Sequence[request_pb2.MediaFile]:
        return [await writer.commit() for writer in self._writers]

    async def discard(self) -> None:
        await asyncio.gather(*(writer.discard() for writer in self._writers))


def _stored_output(wanted: StreamedOutput, emitted: Emitted, store: MediaStore | None) -> _StoredFile | _StoredImages:
    if store is None or not store.config.store:
        raise UnsupportedError(
            f"output {wanted.tensor} cannot be stored, because this stage has no object store; set media.store in the "
            "pipeline file and restart the stage, or let the output be sent"
        )
    return _StoredImages(wanted, store) if emitted.kind == "image" else _StoredFile(wanted, emitted, store)


async def _make_encoder(wanted: StreamedOutput, emitted: Emitted) -> Encoder:
    # The encoders' library is loaded at the first use, which would block the event loop.
    return await asyncio.to_thread(
        make_encoder, wanted.media_type, sample_rate_hz=emitted.sample_rate_hz, frame_rate=wanted.frame_rate
    )


def _ended(name: str, parts: Sequence[request_pb2.Output], finish: Finish) -> Sequence[request_pb2.Output]:
    """Returns the last parts of an output, with `finish` in the last one."""
    ended = [*parts] or [request_pb2.Output(name=name)]
    ended[-1].finish.CopyFrom(finish_to_wire(finish))
    return ended
