"""The outputs of one attempt: collects text, and writes everything else to files in the object store."""

import asyncio
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from stagemesh.client import (
    AudioChunk,
    Event,
    Image,
    MediaChunk,
    OutputFinished,
    StoredFile,
    TensorOutput,
    Text,
    Tokens,
    WavWriter,
)
from stagemesh.common.errors import UnsupportedError
from stagemesh.common.media.files import MEDIA_PART_BYTES, suffix_of
from stagemesh.common.media.store import MediaStore
from stagemesh.common.media.stored_file import StoredFileWriter
from stagemesh.v1 import jobs_pb2, request_pb2

FOLDER = "jobs"
"""The folder of the store with the results of jobs."""
_MAX_INLINE_BYTES = 64 << 10
_WAV, _TEXT = "audio/wav", "text/plain"


class AttemptOutputs(AbstractAsyncContextManager["AttemptOutputs"]):
    """The outputs of one attempt. Use it within `async with`, which discards the files unless `keep` has been called.

    All methods raise the errors of `StoredFileWriter.commit` about the store.
    """

    def __init__(self, store: MediaStore, *, folder: str, spool: Path) -> None:
        """Writes to the folder `folder` of the folder for jobs. `spool` is a local folder for unfinished audio."""
        self._store, self._folder = store, folder
        spool.mkdir(parents=True, exist_ok=True)
        self._spool = tempfile.TemporaryDirectory(dir=spool, prefix="job-")
        self._outputs: dict[tuple[str, int], _Output] = defaultdict(_Output)
        self._is_kept = False

    async def add(self, event: Event) -> None:
        """Adds the part of an output in an event.

        Raises UnsupportedError if the output consists of tensors.
        """
        match event:
            case Text(output=name, delta=delta, index=index):
                self._outputs[name, index].texts.append(delta)
            case Tokens(output=name, ids=ids, index=index):
                self._outputs[name, index].token_ids += ids
            case AudioChunk(output=name, index=index):
                output = self._outputs[name, index]
                if output.wav is None:
                    output.wav_path = Path(self._spool.name, f"{len(self._outputs)}.wav")
                    output.wav = WavWriter(output.wav_path)
                await asyncio.to_thread(output.wav.write, event.samples, sample_rate_hz=event.sample_rate_hz)
            case Image(output=name, index=index, preview=False):
                writer = await self._create(name, index, event.media_type)
                await writer.write(event.data)
            case MediaChunk(output=name, index=index):
                writers = self._outputs[name, index].writers
                await (writers[0] if writers else await self._create(name, index, event.media_type)).write(event.data)
            case StoredFile(output=name, index=index):
                self._outputs[name, index].stored.append(event)
            case TensorOutput(output=name):
                raise UnsupportedError(
                    f"output {name!r} consists of tensors, which a job cannot store; omit it from `outputs`, or call "
                    "Generate"
                )
            case OutputFinished(output=name, index=index):
                self._outputs[name, index].finish = _finish_of(event)
            case _:
                pass

    async def commit(self) -> Sequence[jobs_pb2.JobOutput]:
        """Makes the files visible. Returns all outputs."""
        return [await self._commit(name, index, output) for (name, index), output in sorted(self._outputs.items())]

    def keep(self) -> None:
        """Keeps the committed files."""
        self._is_kept = True

    async def _commit(self, name: str, index: int, output: "_Output") -> jobs_pb2.JobOutput:
        message = jobs_pb2.JobOutput(name=name, index=index, finish=output.finish)
        if output.token_ids:
            message.token_ids.ids.extend(output.token_ids)
        text = "".join(output.texts)
        if len(encoded := text.encode()) <= _MAX_INLINE_BYTES:
            message.text = text
        else:
            await (await self._create(name, index, _TEXT)).write(encoded)
        if output.wav is not None:
            await asyncio.to_thread(output.wav.close)
            writer = await self._create(name, index, _WAV)
            for block in _blocks(output.wav_path):
                await writer.write(block)
        message.files.extend([await writer.commit() for writer in output.writers])
        for each in (event.file for event in output.stored):
            message.files.add(uri=each.uri, media_type=each.media_type, size_bytes=each.size_bytes, sha256=each.sha256)
        return message

    async def _create(self, name: str, index: int, media_type: str) -> StoredFileWriter:
        writers = self._outputs[name, index].writers
        file_name = f"{name}.{index}.{len(writers)}{suffix_of(media_type)}"
        uri = self._store.config.uri_of(FOLDER, self._folder, file_name)
        writer = await self._store.create(uri, media_type)
        writers.append(writer)
        return writer

    async def __aexit__(self, *_: object) -> None:
        for output in self._outputs.values():
            if output.wav is not None:
                output.wav.close()
        self._spool.cleanup()
        if not self._is_kept:
            writers = [writer for output in self._outputs.values() for writer in output.writers]
            await asyncio.gather(*(writer.discard() for writer in writers))


class _Output:
    """An output of one choice."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.token_ids: list[int] = []
        self.wav: WavWriter | None = None
        self.wav_path = Path()
        self.writers: list[StoredFileWriter] = []
        self.stored: list[StoredFile] = []
        self.finish = request_pb2.Finish()


def _blocks(path: Path) -> Iterable[bytes]:
    with path.open("rb") as file:
        while block := file.read(MEDIA_PART_BYTES):
            yield block


def _finish_of(event: OutputFinished) -> request_pb2.Finish:
    reason = request_pb2.FinishReason.Value(f"FINISH_REASON_{event.reason.upper()}")
    stop: dict[str, Any] = {"stop_text": event.stop_text, "stop_token_id": event.stop_token_id}
    return request_pb2.Finish(reason=reason, **stop)
