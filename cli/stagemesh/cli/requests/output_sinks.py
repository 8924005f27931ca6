"""The destinations of a request's outputs: stdout, stderr and files, written while the outputs arrive."""

import sys
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import numpy as np

from stagemesh.client import (
    Admitted,
    AudioChunk,
    Choice,
    Client,
    Event,
    Finished,
    Image,
    MediaChunk,
    OutputFinished,
    Queued,
    TensorOutput,
    Text,
    WavWriter,
)
from stagemesh.common.errors import writing
from stagemesh.common.media.files import suffix_of
from stagemesh.common.requests.output_position import OutputKey

_REMEDY = "; choose another --output"


class Sinks(ExitStack):
    """Writes the outputs of a request to stdout and to files.

    Text is written to stdout, and the queue position to stderr, unless `quiet` is True. The first audio output is
    written to the file `audio`, and the first image or video output to the file `image`. All other audio, images,
    videos and tensors are written to files in `folder`. Each of these files has the name of its output. If `folder` is
    None, these outputs are discarded. Audio that arrives as an encoded file is written as it is, other audio as WAV.

    If the request has several choices, each text is written once it is complete, and the index of the choice follows
    the name of each file, for example "audio.1.wav".

    `files` contains the paths of the written files, by output name and index of the choice. The end of the `with` block
    completes the files and the texts.
    """

    def __init__(self, *, folder: Path | None, audio: Path | None, image: Path | None = None, quiet: bool) -> None:
        super().__init__()
        self._folder, self._quiet = folder, quiet
        self._named = {"audio": audio, "image": image, "video": image}
        """The file that the caller has named for each kind of media."""
        self._owners: dict[Path, str] = {}
        """The output that is written to each named file."""
        self._images = defaultdict[OutputKey, list[Path]](list)
        """The files of the images of each output, without previews."""
        self._writers: dict[OutputKey, WavWriter] = {}
        self._media: dict[OutputKey, BinaryIO] = {}
        self._mid_line = False
        self._has_choices = False
        """Whether the request has several choices."""
        self._texts = defaultdict[OutputKey, str](str)
        """The incomplete texts of several choices."""
        self.files: dict[OutputKey, list[Path]] = {}
        self.callback(self.end_texts)

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
            case MediaChunk():
                self._write_media(event)
            case TensorOutput() if self._folder is not None:
                self._write_tensor(event, self._folder)
            case Finished():
                self.end_texts()
            case _:
                pass

    @property
    def unwritten(self) -> Sequence[Path]:
        """The files `audio` and `image` to which no output was written."""
        named = (self._named["audio"], self._named["image"])
        return [path for path in named if path is not None and path not in self._owners]

    def download(self, choices: Sequence[Choice], *, endpoints: Sequence[str]) -> None:
        """Downloads the stored outputs of a request's choices to files in `folder`. Does nothing if `folder` is None.

        `endpoints` are the addresses of orchestrators. Raises the errors of `Client.download`.
        """
        if self._folder is None or not any(choice.files for choice in choices):
            return
        self._create_folder(self._folder)
        with Client(*endpoints) as client:
            for index, choice in enumerate(choices):
                for output, files in choice.files.items():
                    for number, file in enumerate(files):
                        path = self._numbered(self._folder / f"{output}{_suffix(file.media_type)}", index, number)
                        client.download(file, path)
                        self.files.setdefault((output, index), []).append(path)

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

    def end_texts(self) -> None:
        """Writes the incomplete texts of choices, and ends the line of text on stdout."""
        for key in list(self._texts):
            self._end_text(key)
        if self._mid_line:
            sys.stdout.write("\n")
            sys.stdout.flush()
            self._mid_line = False

    def _write_audio(self, event: AudioChunk) -> None:
        key = event.output, event.index
        if key not in self._writers and (path := self._path(event, "audio/wav")) is not None:
            self._writers[key] = self.enter_context(WavWriter(path))
            self.files[key] = [path]
        if key in self._writers:
            self._writers[key].write(event.samples, sample_rate_hz=event.sample_rate_hz)

    def _write_media(self, event: MediaChunk) -> None:
        key = event.output, event.index
        if key not in self._media and (path := self._path(event, event.media_type)) is not None:
            self._write_file(path, b"")
            self._media[key] = self.enter_context(path.open("wb"))
            self.files[key] = [path]
        if key in self._media:
            self._media[key].write(event.data)

    def _write_image(self, event: Image) -> None:
        key = event.output, event.index
        paths = self._images[key]
        path = self._path(event, event.media_type, number=len(paths))
        if path is not None:
            # The image that a preview announces replaces the preview.
            self._write_file(path, event.data)
            self.files[key] = [*paths, path]
            if not event.preview:
                paths.append(path)

    def _path(self, event: AudioChunk | MediaChunk | Image, media_type: str, *, number: int = 0) -> Path | None:
        """Returns the path of the file for an output, or None if the output must not be written.

        `number` is the number of complete files of the same output and choice before this file.
        """
        path = self._named.get(media_type.partition("/")[0])
        if path is None or self._owners.setdefault(path, event.output) != event.output:
            if self._folder is None:
                return None
            path = self._folder / f"{event.output}{_suffix(media_type)}"
        return self._numbered(path, event.index, number)

    def _numbered(self, path: Path, index: int, number: int = 0) -> Path:
        """Adds the index of the choice, and the number of a file after the first one, to the name of a file."""
        choice = f".{index}" if self._has_choices else ""
        return path.with_stem(f"{path.stem}{choice}{f'-{number + 1}' if number else ''}")

    def _write_tensor(self, event: TensorOutput, folder: Path) -> None:
        paths = self.files.setdefault((event.output, event.index), [])
        path = self._numbered(folder / f"{event.output}.npy", event.index)
        path = path.with_stem(f"{path.stem}-{len(paths)}")
        self._write_file(path, b"")
        np.save(path, event.tensor, allow_pickle=False)
        paths.append(path)

    def _write_file(self, path: Path, content: bytes) -> None:
        self._create_folder(path.parent)
        with writing(path, remedy=_REMEDY):
            path.write_bytes(content)

    def _create_folder(self, folder: Path) -> None:
        with writing(folder, remedy=_REMEDY):
            folder.mkdir(parents=True, exist_ok=True)


def _suffix(media_type: str) -> str:
    return suffix_of(media_type) or ".bin"
