"""`stagemesh generate`."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from stagemesh.orchestrator.cli import sampling
from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import DEFAULT_SERVER, Server, read_endpoints, read_pairs

if TYPE_CHECKING:
    from stagemesh.client import AsyncClient, Content, GenerateArguments, Result
    from stagemesh.orchestrator.cli.output_sinks import Sinks

Prompt = Annotated[str, typer.Argument(help="What to work on; - reads it from stdin.")]
Audio = Annotated[Path | None, typer.Option(help="Write audio to this WAV file as it comes.")]
Picture = Annotated[
    Path | None, typer.Option("--image", help="Write the picture or film to this file, over what was there before.")
]
NegativePrompt = Annotated[str | None, typer.Option(help="What pictures are not to show.")]
Attach = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE", help="A picture, sound or film to go before the prompt; may be given again."),
]


def generate(
    prompt: Prompt,
    server: Server = DEFAULT_SERVER,
    output: Annotated[Path | None, typer.Option(help="Write audio, images and tensors into this folder.")] = None,
    audio: Audio = None,
    image: Picture = None,
    outputs: Annotated[str | None, typer.Option(help="The outputs wanted, with commas; all when left out.")] = None,
    attach: Attach = None,
    negative_prompt: NegativePrompt = None,
    max_tokens: sampling.MaxTokens = None,
    temperature: sampling.Temperature = None,
    top_p: sampling.TopP = None,
    top_k: sampling.TopK = None,
    min_p: sampling.MinP = None,
    repetition_penalty: sampling.RepetitionPenalty = None,
    presence_penalty: sampling.PresencePenalty = None,
    frequency_penalty: sampling.FrequencyPenalty = None,
    stop: sampling.Stop = None,
    stop_token: sampling.StopToken = None,
    min_tokens: sampling.MinTokens = None,
    ignore_eos: sampling.IgnoreEnd = False,
    bad_word: sampling.BadWord = None,
    logprobs: sampling.Logprobs = None,
    json_schema: sampling.JsonSchema = None,
    regex: sampling.Regex = None,
    choice: sampling.Choice = None,
    grammar: sampling.Grammar = None,
    seed: sampling.Seed = None,
    adapter: sampling.Adapter = None,
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option that a stage declares.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds that the request may take.")] = None,
    priority: Annotated[int, typer.Option(help="Higher goes first where requests queue, from -10 to 10.")] = 0,
    caller: Annotated[str, typer.Option(help="In whose name; callers share the pipeline evenly.")] = "",
    request_id: Annotated[str | None, typer.Option(help="Names the request everywhere; drawn when left out.")] = None,
    as_json: AsJson = False,
) -> None:
    """Sends a prompt to a running pipeline; text goes to stdout, audio to files, timings to stderr."""
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
        "json_schema": sampling.read_text(json_schema, option="--json-schema"),
        "regex": regex,
        "choice": choice or None,
        "grammar": sampling.read_text(grammar, option="--grammar"),
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
    """Runs a request to its end, with everything put into `sinks` as it comes."""
    from stagemesh.client.results import ResultBuilder

    builder = ResultBuilder()
    async for event in client.generate(prompt, timeout_s=timeout_s, **arguments):
        builder.add(event)
        sinks.take(event)
    return builder.build()


def show_result(result: "Result", sinks: "Sinks", *, as_json: bool) -> None:
    """Says how it went: as JSON to stdout, or as tables to stderr."""
    from rich.console import Console

    from stagemesh.orchestrator.cli.tables import summary
    from stagemesh.orchestrator.cli.terminal_image import as_text

    if as_json:
        typer.echo(json.dumps(_document(result, sinks), ensure_ascii=False))
        return
    console = Console(stderr=True, highlight=False)
    if console.is_terminal:
        for picture in result.images.values():
            console.print(as_text(picture) or "")
    console.print(summary(result))
    for paths in sinks.files.values():
        for path in paths:
            console.print(f"wrote {path}", markup=False, soft_wrap=True)
    if result.audios and not sinks.files:
        console.print("the audio was not kept; --audio FILE writes it to a WAV file", style="yellow")
    if result.images and not sinks.files:
        console.print("the picture was not kept; --image FILE writes it to a file", style="yellow")


def _document(result: "Result", sinks: "Sinks") -> dict[str, object]:
    from dataclasses import asdict

    from stagemesh.orchestrator.cli.tables import audio_s, real_time_factor

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
        "audio_s": audio_s(result),
        "total_s": result.total_s,
        "real_time_factor": real_time_factor(result),
        "stages": {name: asdict(report) for name, report in result.finished.stages.items()},
        "edges": [asdict(edge) for edge in result.finished.edges],
    }
