"""The output of `stagemesh generate` after a request: times, ends of outputs and stages, files, or one document."""

import io
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import chain
from typing import TYPE_CHECKING

from stagemesh.cli.terminal.output import print_json
from stagemesh.cli.terminal.tables import Column, fields, make_table, number, numbers

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from stagemesh.cli.requests.output_sinks import Sinks
    from stagemesh.client import Image, MediaFile, OutputFinished, Result

_IMAGE_COLUMNS = 48


def show_result(result: "Result", sinks: "Sinks", *, as_json: bool) -> None:
    """Prints the result of a request.

    If `as_json` is True, prints JSON to stdout. Otherwise, prints the timings and the names of the written files to
    stderr. If stderr is a terminal, also prints the images.
    """
    from rich.console import Console

    if as_json:
        print_json(_document(result, sinks))
        return
    console = Console(stderr=True, highlight=False)
    images = chain.from_iterable(chain.from_iterable(choice.images.values()) for choice in result.choices)
    for image in images if console.is_terminal else ():
        console.print(_terminal_image(image) or "")
    for table in _summary(result):
        console.print(table)
    for line in (*_output_ends(result), *_stage_ends(result)):
        console.print(line, markup=False)
    for line in _warnings(result):
        console.print(line, style="yellow", markup=False, soft_wrap=True)
    for file in chain.from_iterable(chain.from_iterable(choice.files.values() for choice in result.choices)):
        text = f"stored {file.uri} ({file.media_type}, {file.size_bytes} bytes, SHA-256 {file.sha256.hex()})"
        console.print(text, markup=False, soft_wrap=True)
    for path in chain.from_iterable(sinks.files.values()):
        console.print(f"wrote {path}", markup=False, soft_wrap=True)
    for line in _unsaved(result, sinks):
        console.print(line, style="yellow", markup=False, soft_wrap=True)


def _unsaved(result: "Result", sinks: "Sinks") -> "Iterator[str]":
    """Yields a line for each named file without an output, and for outputs that were not written to a file."""
    for path in sinks.unwritten:
        yield f"{path} was not written, because the request produced no output of this kind"
    if result.audios and not sinks.files:
        yield "the audio was not saved; --audio FILE writes it to a WAV file"
    if any((output, 0) not in sinks.files for output in result.media):
        yield "a media file was not saved; --output FOLDER writes it to a folder"
    if result.images and not sinks.files:
        yield "the image was not saved; --image FILE writes it to a file"


def _summary(result: "Result") -> "Sequence[Table]":
    audio_s = _audio_s(result)
    rows = (
        ("time to first text", result.first_text_s, " s"),
        ("time to first audio", result.first_audio_s, " s"),
        ("audio", audio_s or None, " s"),
        ("time to first image", result.first_image_s, " s"),
        ("total", result.total_s, " s"),
        ("real-time factor", _real_time_factor(result), ""),
    )
    times = (Column("", lambda row: row[0]), Column("", lambda row: f"{row[1]:.2f}{row[2]}"))
    edges = (*fields("edge", "connector"), *numbers("chunks"), number("bytes", lambda edge: edge.size_bytes))
    timings = make_table(times, [row for row in rows if row[1] is not None])
    timings.show_header = False
    return (timings, make_table(edges, result.finished.edges)) if result.finished.edges else (timings,)


def _describe_finish(finish: "OutputFinished", *, several: bool) -> str:
    choice = f" of choice {finish.index}" if several else ""
    if finish.reason == "empty":
        return f"output {finish.output}{choice} is empty: the stage that makes it ended without making anything of it"
    stop = finish.stop_text if finish.stop_token_id is None else f"token {finish.stop_token_id}"
    detail = f" ({stop})" if finish.reason == "stop" else ""
    return f"output {finish.output}{choice} ended early: {finish.reason}{detail}"


def _output_ends(result: "Result") -> "Iterator[str]":
    """Yields a line for each output that is empty, or that a limit, a stop text or a failure ended."""
    for finish in chain.from_iterable(choice.finishes.values() for choice in result.choices):
        if finish.reason != "end":
            yield _describe_finish(finish, several=len(result.choices) > 1)


def _stage_ends(result: "Result") -> "Iterator[str]":
    """Yields a line for each stage that a limit or a stop text ended, if the request ran on several stages.

    The outputs of a pipeline do not show that a stage before them was cut short.
    """
    for index, stages in enumerate(result.finished.choices):
        choice = f" of choice {index}" if len(result.choices) > 1 else ""
        for name, report in stages.items() if len(stages) > 1 else ():
            if report.finish_reason not in (None, "end"):
                yield f"stage {name}{choice} ended early: {report.finish_reason}"


def _warnings(result: "Result") -> "Iterator[str]":
    """Yields a line for each warning of a stage."""
    for stages in result.finished.choices:
        for report in stages.values():
            yield from (f"warning: {warning.message} ({warning.reason})" for warning in report.warnings)


def _audio_s(result: "Result") -> float:
    return sum(audio.duration_s for choice in result.choices for audio in choice.audios.values())


def _real_time_factor(result: "Result") -> float | None:
    """Returns the request's total time divided by the playing time of the request's audio outputs of all choices.

    Returns None without audio.
    """
    audio_s = _audio_s(result)
    return result.total_s / audio_s if audio_s else None


def _terminal_image(image: "Image") -> "RenderableType | None":
    """Returns an image as colored half-block characters for a terminal.

    Returns None if the required packages are not installed.
    """
    try:
        from PIL import Image as PillowImage
        from rich_pixels import Pixels
    except ImportError:
        return None
    with PillowImage.open(io.BytesIO(image.data)) as opened:
        thumbnail = opened.convert("RGB")
    thumbnail.thumbnail((_IMAGE_COLUMNS, 2 * _IMAGE_COLUMNS))
    pixels: RenderableType = Pixels.from_image(thumbnail)
    return pixels


def _stored(file: "MediaFile") -> dict[str, object]:
    stated = {name: getattr(file, name) for name in ("uri", "media_type", "size_bytes")}
    return {**stated, "sha256": file.sha256.hex()}


def _document(result: "Result", sinks: "Sinks") -> dict[str, object]:
    choices = [_choice_document(result, index, sinks) for index in range(len(result.choices))]
    return {
        "request_id": result.request_id,
        **choices[0],
        **({"choices": choices} if len(choices) > 1 else {}),
        **{name: getattr(result, name) for name in ("first_text_s", "first_audio_s", "first_image_s", "total_s")},
        "audio_s": _audio_s(result),
        "real_time_factor": _real_time_factor(result),
        "edges": [asdict(edge) for edge in result.finished.edges],
    }


def _choice_document(result: "Result", index: int, sinks: "Sinks") -> dict[str, object]:
    """Returns the outputs of the choice with this index, and the reports of its stages, for JSON."""
    choice = result.choices[index]
    return {
        "seed": choice.seed,
        "texts": dict(choice.texts),
        "tokens": dict(choice.tokens),
        "logprobs": {output: [asdict(each) for each in logprobs] for output, logprobs in choice.logprobs.items()},
        "finishes": {output: _finish_document(each) for output, each in choice.finishes.items()},
        "files": {key[0]: [str(path) for path in paths] for key, paths in sinks.files.items() if key[1] == index},
        "stored": {output: [_stored(each) for each in files] for output, files in choice.files.items()},
        "stages": {name: asdict(report) for name, report in result.finished.choices[index].items()},
    }


def _finish_document(finish: "OutputFinished") -> dict[str, object]:
    return {name: value for name, value in asdict(finish).items() if name != "turn"}
