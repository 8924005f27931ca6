"""`stagemesh generate`: sends a prompt to a running pipeline and prints its outputs."""

import asyncio
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import DEFAULT_SERVER, Server, read_endpoints, read_pairs
from stagemesh.orchestrator.cli.output import Column, make_table, number, print_json
from stagemesh.orchestrator.cli.parameters import Parameter, argument, option
from stagemesh.orchestrator.cli.sampling_options import SAMPLING, read_text

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from stagemesh.client import AsyncClient, Content, GenerateArguments, Image, Result
    from stagemesh.orchestrator.cli.output_sinks import Sinks

_IMAGE_COLUMNS = 48

PARAMETERS: Mapping[str, Parameter] = {
    "prompt": argument(str, "Send this prompt. A single - reads the prompt from standard input.", metavar="PROMPT"),
    "server": Parameter(Server, DEFAULT_SERVER),
    "output": option(
        Path,
        "Write all audio, images and tensors to files in this folder, named after their outputs. Writes none if "
        "omitted.",
        metavar="FOLDER",
    ),
    "audio": option(Path, "Write the audio output to this WAV file while it arrives.", metavar="FILE"),
    "image": option(
        Path, "Write the image or video output to this file. An existing file is replaced.", "--image", metavar="FILE"
    ),
    "outputs": option(
        str,
        "Produce only these outputs of the pipeline, separated by commas. Produces all if omitted.",
        metavar="NAMES",
    ),
    "attach": option(list[Path], "Put an image, audio or video file before the prompt. Repeatable.", metavar="FILE"),
    "negative_prompt": option(str, "Describe what generated images and videos must not show.", metavar="TEXT"),
    **SAMPLING,
    "options": option(
        list[str],
        "Set an option that a stage of the pipeline declares, such as steps=20. Repeatable.",
        "--option",
        metavar="KEY=VALUE",
    ),
    "timeout": option(
        float,
        "Fail if the request takes longer than this number of seconds. There is no limit if omitted.",
        metavar="SECONDS",
    ),
    "priority": option(
        int, "Set the priority, from -10 to 10. Requests of a higher priority leave the queue first.", default=0
    ),
    "caller": option(
        str,
        "Set the caller of the request. Callers get equal shares of the pipeline. Requests without a caller count as "
        "one caller.",
        default="",
        metavar="NAME",
    ),
    "request_id": option(
        str, "Set the id that identifies the request in logs and admin commands. Random if omitted.", metavar="ID"
    ),
    "as_json": Parameter(AsJson, False),
}
# The parameters that are passed unchanged to the client.
_CLIENT_ARGUMENTS = {*SAMPLING, "negative_prompt", "priority", "caller", "request_id"}


def generate(**values: Any) -> None:
    """Send a prompt to a running pipeline. Print text to stdout and timings to stderr, and write other outputs to
    files.
    """
    from stagemesh.client import read_media
    from stagemesh.orchestrator.cli.output_sinks import Sinks

    prompt, attach, as_json = values["prompt"], values["attach"], values["as_json"]
    text = typer.get_text_stream("stdin").read() if prompt == "-" else prompt
    content = [*map(read_media, attach), text] if attach else text
    arguments = client_arguments(values)
    with Sinks(folder=values["output"], audio=values["audio"], image=values["image"], quiet=as_json) as sinks:
        request = _request(values["server"], content, arguments=arguments, timeout_s=values["timeout"], sinks=sinks)
        result = asyncio.run(request)
    show_result(result, sinks, as_json=as_json)


def client_arguments(values: Mapping[str, Any]) -> "GenerateArguments":
    """Returns the arguments of `AsyncClient.generate` for the command's parameters that are set.

    Raises BadParameter if a file cannot be read or an option is malformed.
    """
    given = {name: value for name, value in values.items() if value not in (None, [], "")}
    arguments = {name: value for name, value in given.items() if name in _CLIENT_ARGUMENTS}
    for name in arguments.keys() & {"json_schema", "grammar"}:
        arguments[name] = read_text(given[name], option=f"--{name.replace('_', '-')}")
    if "outputs" in given:
        arguments["outputs"] = [name.strip() for name in given["outputs"].split(",")]
    if "options" in given:
        arguments["options"] = read_pairs(given["options"], option="--option", convert=float)
    return cast("GenerateArguments", arguments)


async def _request(
    server: str, prompt: "Content", *, arguments: "GenerateArguments", timeout_s: float | None, sinks: "Sinks"
) -> "Result":
    from stagemesh.client import AsyncClient

    async with AsyncClient(*read_endpoints(server)) as client:
        return await stream(client, prompt, arguments=arguments, timeout_s=timeout_s, sinks=sinks)


async def stream(
    client: "AsyncClient",
    prompt: "Content",
    *,
    arguments: "GenerateArguments",
    timeout_s: float | None,
    sinks: "Sinks",
) -> "Result":
    """Runs a request until it finishes, passes each event to `sinks` as it arrives, and returns the result."""
    from stagemesh.client.responses import ResultBuilder

    builder = ResultBuilder()
    async for event in client.generate(prompt, timeout_s=timeout_s, **arguments):
        builder.add(event)
        sinks.write(event)
    return builder.build()


def show_result(result: "Result", sinks: "Sinks", *, as_json: bool) -> None:
    """Prints the result of a request.

    If `as_json` is True, prints JSON to stdout. Otherwise, prints the images, timings and file names to stderr.
    """
    from rich.console import Console

    if as_json:
        print_json(_document(result, sinks))
        return
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        for image in result.images.values():
            console.print(_terminal_image(image) or "")
    for table in _summary(result):
        console.print(table)
    for paths in sinks.files.values():
        for path in paths:
            console.print(f"wrote {path}", markup=False, soft_wrap=True)
    if result.audios and not sinks.files:
        console.print("the audio was not saved; --audio FILE writes it to a WAV file", style="yellow")
    if result.images and not sinks.files:
        console.print("the image was not saved; --image FILE writes it to a file", style="yellow")


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
    edges = (
        Column("edge", lambda edge: edge.edge),
        Column("connector", lambda edge: edge.connector),
        number("chunks", lambda edge: edge.chunks),
        number("bytes", lambda edge: edge.size_bytes),
    )
    timings = make_table(times, [row for row in rows if row[1] is not None])
    timings.show_header = False
    return timings, make_table(edges, result.finished.edges)


def _audio_s(result: "Result") -> float:
    return sum(audio.duration_s for audio in result.audios.values())


def _real_time_factor(result: "Result") -> float | None:
    """Returns the request's total time divided by the playing time of its audio, or None if there is no audio."""
    audio_s = _audio_s(result)
    return result.total_s / audio_s if audio_s else None


def _terminal_image(image: "Image") -> "RenderableType | None":
    """Returns an image as half-block characters for a terminal, or None if the required packages are not installed."""
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


def _document(result: "Result", sinks: "Sinks") -> dict[str, object]:
    from dataclasses import asdict

    return {
        "request_id": result.request_id,
        "seed": result.seed,
        "texts": dict(result.texts),
        "tokens": dict(result.tokens),
        "logprobs": {output: [asdict(each) for each in logprobs] for output, logprobs in result.logprobs.items()},
        "files": {output: [str(path) for path in paths] for output, paths in sinks.files.items()},
        "first_text_s": result.first_text_s,
        "first_audio_s": result.first_audio_s,
        "first_image_s": result.first_image_s,
        "audio_s": _audio_s(result),
        "total_s": result.total_s,
        "real_time_factor": _real_time_factor(result),
        "stages": {name: asdict(report) for name, report in result.finished.stages.items()},
        "edges": [asdict(edge) for edge in result.finished.edges],
    }
