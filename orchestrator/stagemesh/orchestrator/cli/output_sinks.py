"""The destinations of a request's outputs: stdout, stderr and files, written while the outputs arrive."""

import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from stagemesh.client import (
    Admitted,
    AudioChunk,
    Event,
    Finished,
    Image,
    OutputFinished,
    Queued,
    TensorOutput,
    Text,
    WavWriter,
)
from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.output_position import OutputKey

_SUFFIXES = {"image/png": ".png", "image/jpeg": ".jpg", "image/webp": ".webp"}


class Sinks(ExitStack):
    """Writes the outputs of a request to stdout and to files.

    Text is written to stdout, and the queue position to stderr, unless `quiet` is True. The first audio output is
    written to the file `audio`, and the first image output to the file `image`. All other audio, images and tensors are
    written to files in `folder`. Each of these files has the name of its output. If `folder` is None, these outputs are
    discarded.

    If the request has several choices, each text is written once it is complete, and the index of the choice follows
    the name of each file, for example "audio.1.wav".

    `files` contains the paths of the written files, by output name and index of the choice. The end of the `with` block
    completes the files and the texts.
    """

    def __init__(self, *, folder: Path | None, audio: Path | None, image: Path | None = None, quiet: bool) -> None:
        super().__init__()
        self._folder, self._audio, self._image, self._quiet = folder, audio, image, quiet
        self._audio_output: str | None = None
        self._image_output: str | None = None
        self._images = defaultdict[OutputKey, list[Path]](list)
        """The files of the images of each output, without previews."""
        self._writers: dict[OutputKey, WavWriter] = {}
        self._mid_line = False
        self._has_choices = False
        """Whether the request has several choices."""
        self._texts = defaultdict[OutputKey, str](str)
        """The incomplete texts of several choices."""
        self.files: dict[OutputKey, list[Path]] = {}
        self.callback(self._end_texts)

    def write(self, event: Event) -> None:
        """Writes an event of a request: an output to stdout or to a file, and a queue position to stderr."""
        match event:
            case Queued() if not self._quiet:
                sys.stderr.write(f"queued: position {event.position}, about {event.expected_wait_s:.0f} s\n")
                sys.stderr.flush()
            case Admitted():
                self._has_choices = len(event.choices) > 1
            case Text() if not self._quiet and event.delta:
                self._write_text(event)
            case OutputFinished() if (event.output, event.index) in self._texts:
                self._end_text((event.output, event.index))
            case AudioChunk():
                self._write_audio(event)
            case Image():
                self._write_image(event)
            case TensorOutput() if self._folder is not None:
                self._write_tensor(event, self._folder)
            case Finished():
                self._end_texts()
            case _:
                pass

    def _write_text(self, event: Text) -> None:
        if self._has_choices:
            self._texts[event.output, event.index] += event.delta
            return
        sys.stdout.write(event.delta)
        sys.stdout.flush()
        self._mid_line = not event.delta.endswith("\n")

    def _end_text(self, key: OutputKey) -> None:
        text = self._texts.pop(key)
        sys.stdout.write(f"choice {key[1]}:\n{text}" + "\n" * (not text.endswith("\n")))
        sys.stdout.flush()

    def _end_texts(self) -> None:
        for key in list(self._texts):
            self._end_text(key)
        if self._mid_line:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._mid_line = False

    def _write_audio(self, event: AudioChunk) -> None:
        key = event.output, event.index
        writer = self._writers.get(key)
        if writer is None:
            path = self._audio_path(event)
            if path is None:
                return
            writer = self._writers[key] = self.enter_context(WavWriter(path))
            self.files[key] = [path]
        writer.write(event.samples, sample_rate_hz=event.sample_rate_hz)

    def _audio_path(self, event: AudioChunk) -> Path | None:
        if self._audio is not None and self._audio_output in (None, event.output):
            self._audio_output = event.output
            return self._path_of_choice(self._audio, event.index)
        return self._path_of_choice(self._folder / f"{event.output}.wav", event.index) if self._folder else None

    def _path_of_choice(self, path: Path, index: int) -> Path:
        return path.with_stem(f"{path.stem}.{index}") if self._has_choices else path

    def _write_image(self, event: Image) -> None:
        key = event.output, event.index
        paths = self._images[key]
        path = self._image_path(event, number=len(paths))
        if path is not None:
            # The image that a preview announces replaces the preview.
            self._write_file(path, event.data)
            self.files[key] = [*paths, path]
            if not event.preview:
                paths.append(path)

    def _image_path(self, event: Image, *, number: int) -> Path | None:
        """Returns the path of the file for an image, or None if the image must not be written.

        `number` is the number of images of the same output and choice before this image. The name of a later file ends
        with the image's number, for example "image-2.png".
        """
        if self._image is not None and self._image_output in (None, event.output):
            self._image_output = event.output
            path = self._image
        elif self._folder:
            path = self._folder / f"{event.output}{_SUFFIXES.get(event.media_type, '.bin')}"
        else:
            return None
        path = self._path_of_choice(path, event.index)
        return path.with_stem(f"{path.stem}-{number + 1}") if number else path

    def _write_tensor(self, event: TensorOutput, folder: Path) -> None:
        paths = self.files.setdefault((event.output, event.index), [])
        path = self._path_of_choice(folder / f"{event.output}.npy", event.index)
        path = path.with_stem(f"{path.stem}-{len(paths)}")
        self._write_file(path, b"")
        np.save(path, event.tensor, allow_pickle=False)
        paths.append(path)

    def _write_file(self, path: Path, content: bytes) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        except OSError as exc:
            raise InvalidRequestError(
                f"cannot write {path}: {exc.strerror}; choose another --output", reason="CANNOT_WRITE"
            ) from exc
