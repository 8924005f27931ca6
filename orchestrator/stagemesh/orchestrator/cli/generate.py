"""`stagemesh generate`."""

import asyncio
import io
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.orchestrator.cli import sampling_options
from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import DEFAULT_SERVER, Server, read_endpoints, read_pairs
from stagemesh.orchestrator.cli.output import Column, make_table, number, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import RenderableType
    from rich.table import Table

    from stagemesh.client import AsyncClient, Content, GenerateArguments, Image, Result
    from stagemesh.orchestrator.cli.output_sinks import Sinks

_IMAGE_COLUMNS = 48

Prompt = Annotated[str, typer.Argument(help="Send this prompt. A single - reads the prompt from standard input.")]
Audio = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Write the audio output to this WAV file while it arrives."),
]
ImagePath = Annotated[
    Path | None,
    typer.Option(
        "--image", metavar="FILE", help="Write the image or video output to this file. An existing file is replaced."
    ),
]
NegativePrompt = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Describe what generated images and videos must not show.")
]
Attach = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="Put an image, audio or video file before the prompt. Repeatable."),
]
RequestTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS",
        help="Fail if the request takes longer than this number of seconds. There is no limit if omitted.",
    ),
]


def generate(
    prompt: Prompt,
    server: Server = DEFAULT_SERVER,
    output: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="Write all audio, images and tensors to files in this folder, named after their outputs. Writes "
            "none if omitted.",
        ),
    ] = None,
    audio: Audio = None,
    image: ImagePath = None,
    outputs: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Produce only these outputs of the pipeline, separated by commas. Produces all if omitted.",
        ),
    ] = None,
    attach: Attach = None,
    negative_prompt: NegativePrompt = None,
    max_tokens: sampling_options.MaxTokens = None,
    temperature: sampling_options.Temperature = None,
    top_p: sampling_options.TopP = None,
    top_k: sampling_options.TopK = None,
    min_p: sampling_options.MinP = None,
    repetition_penalty: sampling_options.RepetitionPenalty = None,
    presence_penalty: sampling_options.PresencePenalty = None,
    frequency_penalty: sampling_options.FrequencyPenalty = None,
    stop: sampling_options.Stop = None,
    stop_token: sampling_options.StopToken = None,
    min_tokens: sampling_options.MinTokens = None,
    ignore_eos: sampling_options.IgnoreEnd = False,
    bad_word: sampling_options.BadWord = None,
    logprobs: sampling_options.Logprobs = None,
    json_schema: sampling_options.JsonSchema = None,
    regex: sampling_options.Regex = None,
    choice: sampling_options.Choice = None,
    grammar: sampling_options.Grammar = None,
    seed: sampling_options.Seed = None,
    adapter: sampling_options.Adapter = None,
    option: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help="Set an option that a stage of the pipeline declares. Repeatable."),
    ] = None,
    timeout: RequestTimeout = None,
    priority: Annotated[
        int, typer.Option(help="Set the priority, from -10 to 10. Requests of a higher priority leave the queue first.")
    ] = 0,
    caller: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="Set the caller of the request. Callers get equal shares of the pipeline. Requests without a caller "
            "count as one caller.",
            show_default=False,
        ),
    ] = "",
    request_id: Annotated[
        str | None,
        typer.Option(
            metavar="ID", help="Set the id that identifies the request in logs and admin commands. Random if omitted."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Send a prompt to a running pipeline. Prints text to stdout and timings to stderr, and writes other outputs to
    files.
    """
    from stagemesh.client import read_media
    from stagemesh.orchestrator.cli.output_sinks import Sinks

    arguments: GenerateArguments = {
        "outputs": [name.strip() for name in outputs.split(",")] if outputs else [],
        "negative_prompt": negative_prompt or "",
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "stop": stop or (),
        "stop_token_ids": stop_token or (),
        "min_tokens": min_tokens,
        "ignore_eos": ignore_eos,
        "bad_words": bad_word or (),
        "logprobs": logprobs,
        "json_schema": sampling_options.read_text(json_schema, option="--json-schema"),
        "regex": regex,
        "choice": choice or None,
        "grammar": sampling_options.read_text(grammar, option="--grammar"),
        "seed": seed,
        "adapter": adapter,
        "options": read_pairs(option, option="--option", convert=float),
        "request_id": request_id,
        "priority": priority,
        "caller": caller,
    }
    text = typer.get_text_stream("stdin").read() if prompt == "-" else prompt
    content = [*map(read_media, attach), text] if attach else text
    with Sinks(folder=output, audio=audio, image=image, quiet=as_json) as sinks:
        result = asyncio.run(_request(server, content, arguments=arguments, timeout_s=timeout, sinks=sinks))
    show_result(result, sinks, as_json=as_json)


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
    """Runs a request to its end and passes each event to `sinks` as it arrives."""
    from stagemesh.client.results import ResultBuilder

    builder = ResultBuilder()
    async for event in client.generate(prompt, timeout_s=timeout_s, **arguments):
        builder.add(event)
        sinks.write(event)
    return builder.build()


def show_result(result: "Result", sinks: "Sinks", *, as_json: bool) -> None:
    """Prints a finished request: as JSON to stdout, or its images, timings and files to stderr."""
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
    """Returns the seconds of computation for each second of audio, or None without audio."""
    audio_s = _audio_s(result)
    return result.total_s / audio_s if audio_s else None


def _terminal_image(image: "Image") -> "RenderableType | None":
    """Returns an image in half blocks for a terminal, or None if the packages that draw it are not installed."""
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
