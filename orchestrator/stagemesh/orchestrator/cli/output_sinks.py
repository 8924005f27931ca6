"""The destinations of a request's outputs: stdout, stderr and files, written while the outputs arrive."""

import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from stagemesh.client import (
    AudioChunk,
    Client,
    Event,
    Finished,
    Image,
    MediaChunk,
    MediaFile,
    Queued,
    TensorOutput,
    Text,
    WavWriter,
)
from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.media_types import suffix_of


class Sinks(ExitStack):
    """Writes the outputs of a request to stdout and to files.

    Text is written to stdout, and the queue position to stderr, unless `quiet` is True. The first audio output is
    written to the file `audio`, and the first image or video output to the file `image`. All other audio, images,
    videos and tensors are written to files in `folder`. Each of these files has the name of its output. If `folder` is
    None, these outputs are discarded. Audio that arrives as an encoded file is written as it is, other audio as WAV.

    `files` contains the paths of the written files, by output name. The end of the `with` block completes the files and
    ends the last line of text.
    """

    def __init__(self, *, folder: Path | None, audio: Path | None, image: Path | None = None, quiet: bool) -> None:
        super().__init__()
        self._folder, self._audio, self._image, self._quiet = folder, audio, image, quiet
        self._image_output: str | None = None
        self._images = defaultdict[str, list[Path]](list)
        """The files of the images of each output, without previews."""
        self._writers: dict[str, WavWriter] = {}
        self._media: dict[str, BinaryIO] = {}
        self._mid_line = False
        self.files: dict[str, list[Path]] = {}
        self.callback(self._end_line)

    def write(self, event: Event) -> None:
        """Writes an event of a request: an output to stdout or to a file, and a queue position to stderr."""
        match event:
            case Queued() if not self._quiet:
                sys.stderr.write(f"queued: position {event.position}, about {event.expected_wait_s:.0f} s\n")
                sys.stderr.flush()
            case Text() if not self._quiet and event.delta:
                sys.stdout.write(event.delta)
                sys.stdout.flush()
                self._mid_line = not event.delta.endswith("\n")
            case AudioChunk():
                self._write_audio(event)
            case Image():
                self._write_image(event)
            case MediaChunk():
                self._write_media(event)
            case TensorOutput() if self._folder is not None:
                self._write_tensor(event, self._folder)
            case Finished():
                self._end_line()
            case _:
                pass

    def download(self, stored: Mapping[str, Sequence[MediaFile]], *, endpoints: Sequence[str]) -> None:
        """Downloads stored outputs to files in `folder`. Does nothing if `folder` is None.

        `stored` contains the files of each output, by output name. `endpoints` are the addresses of orchestrators.
        Raises the errors of `Client.download`.
        """
        if self._folder is None or not stored:
            return
        self._create_folder(self._folder)
        with Client(*endpoints) as client:
            for output, files in stored.items():
                for number, file in enumerate(files, 1):
                    path = self._folder / f"{output}{f'-{number}' if number > 1 else ''}{_suffix(file.media_type)}"
                    client.download(file, path)
                    self.files.setdefault(output, []).append(path)

    def _end_line(self) -> None:
        if self._mid_line:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._mid_line = False

    def _write_audio(self, event: AudioChunk) -> None:
        writer = self._writers.get(event.output)
        if writer is None:
            path = self._audio_path(event.output)
            if path is None:
                return
            writer = self._writers[event.output] = self.enter_context(WavWriter(path))
            self.files[event.output] = [path]
        writer.write(event.samples, sample_rate_hz=event.sample_rate_hz)

    def _audio_path(self, output: str) -> Path | None:
        if self._audio is not None and not self._writers:
            return self._audio
        return self._folder / f"{output}.wav" if self._folder is not None else None

    def _write_media(self, event: MediaChunk) -> None:
        file = self._media.get(event.output)
        if file is None:
            path = self._media_path(event)
            if path is None:
                return
            self._write_file(path, b"")
            file = self._media[event.output] = self.enter_context(path.open("wb"))
            self.files[event.output] = [path]
        file.write(event.data)

    def _media_path(self, event: MediaChunk) -> Path | None:
        if event.media_type.startswith("audio/") and self._audio is not None and not self._writers:
            path, self._audio = self._audio, None
            return path
        if event.media_type.startswith("video/") and self._image is not None and self._image_output is None:
            self._image_output = event.output
            return self._image
        return self._folder / f"{event.output}{_suffix(event.media_type)}" if self._folder is not None else None

    def _write_image(self, event: Image) -> None:
        paths = self._images[event.output]
        path = self._image_path(event, number=len(paths))
        if path is not None:
            # The image that a preview announces replaces the preview.
            self._write_file(path, event.data)
            self.files[event.output] = [*paths, path]
            if not event.preview:
                paths.append(path)

    def _image_path(self, event: Image, *, number: int) -> Path | None:
        """Returns the path of the file for an image, or None if the image must not be written.

        `number` is the number of images of the same output before this image. The name of a later file ends with the
        image's number, for example "image-2.png".
        """
        if self._image is not None and self._image_output in (None, event.output):
            self._image_output = event.output
            path = self._image
        elif self._folder:
            path = self._folder / f"{event.output}{_suffix(event.media_type)}"
        else:
            return None
        return path.with_stem(f"{path.stem}-{number + 1}") if number else path

    def _write_tensor(self, event: TensorOutput, folder: Path) -> None:
        paths = self.files.setdefault(event.output, [])
        path = folder / f"{event.output}-{len(paths)}.npy"
        self._write_file(path, b"")
        np.save(path, event.tensor, allow_pickle=False)
        paths.append(path)

    def _write_file(self, path: Path, content: bytes) -> None:
        self._create_folder(path.parent)
        try:
            path.write_bytes(content)
        except OSError as exc:
            raise _cannot_write(path, exc) from exc

    def _create_folder(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise _cannot_write(folder, exc) from exc


def _cannot_write(path: Path, exc: OSError) -> InvalidRequestError:
    return InvalidRequestError(f"cannot write {path}: {exc.strerror}; choose another --output", reason="CANNOT_WRITE")


def _suffix(media_type: str) -> str:
    return suffix_of(media_type) or ".bin"
