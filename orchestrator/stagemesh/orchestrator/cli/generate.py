"""`stagemesh generate`: sends a prompt to a running pipeline and prints its outputs."""

import asyncio
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from stagemesh.orchestrator.cli.contexts.addresses import SERVER, split_addresses
from stagemesh.orchestrator.cli.error_output import AsJson
from stagemesh.orchestrator.cli.options import Parameter, argument, flag, option, read_pairs
from stagemesh.orchestrator.cli.output import Column, fields, make_table, number, numbers, print_json

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

    from stagemesh.client import (
        Content,
        GenerateArguments,
        Image,
        MediaFile,
        OutputFinished,
        Result,
        StageArguments,
    )
    from stagemesh.orchestrator.cli.output_sinks import Sinks

_IMAGE_COLUMNS = 48

_SAMPLING: Mapping[str, Parameter] = {
    "max_tokens": option(int, "Generate at most this number of tokens. Uses the model's default if omitted.", min=1),
    "temperature": option(
        float,
        "Scale the randomness of sampling: 0 always chooses the most probable token, 1 samples from the model's own "
        "distribution. Uses the model's default if omitted.",
        min=0.0,
    ),
    "top_p": option(
        float,
        "Sample only from the most probable tokens whose probabilities add up to this fraction, above 0 and at most "
        "1. Uses the model's default if omitted.",
    ),
    "top_k": option(
        int,
        "Sample only from the K most probable tokens. 0 means all tokens. Uses the model's default if omitted.",
        min=0,
        metavar="K",
    ),
    "min_p": option(
        float,
        "Drop tokens less probable than this fraction of the most probable token's probability. 0 drops none. Uses "
        "the model's default if omitted.",
        min=0.0,
        max=1.0,
    ),
    "repetition_penalty": option(
        float,
        "Penalize tokens that occur in the prompt or in the output: values above 1 discourage them, values between 0 "
        "and 1 encourage them, 1 has no effect. Uses the model's default if omitted.",
    ),
    "presence_penalty": option(
        float,
        "Penalize each token that occurs in the output by this amount, regardless of how often it occurs. Negative "
        "values encourage them. 0 has no effect. Uses the model's default if omitted.",
        min=-2.0,
        max=2.0,
    ),
    "frequency_penalty": option(
        float,
        "Penalize tokens by this amount for each time they occur in the output. Negative values encourage them. 0 "
        "has no effect. Uses the model's default if omitted.",
        min=-2.0,
        max=2.0,
    ),
    "seed": option(
        int, "Set the random seed. The same seed reproduces the output. Chosen at random if omitted.", min=0
    ),
    "stop": option(
        list[str],
        "End the output when this text is generated. The text itself is not printed. Repeatable.",
        metavar="TEXT",
    ),
    "stop_token_ids": option(
        list[int],
        "End the output when the token with this id is generated. Repeatable.",
        "--stop-token",
        metavar="ID",
        min=0,
    ),
    "min_tokens": option(
        int,
        "Generate at least this number of tokens, unless a --stop text ends the output earlier. 0 sets no minimum. "
        "Uses 0 if omitted.",
        min=0,
    ),
    "ignore_eos": flag("Continue generating after the model's end-of-sequence token.", "--ignore-eos"),
    "bad_words": option(list[str], "Prevent this text from being generated. Repeatable.", "--bad-word", metavar="TEXT"),
    "logprobs": option(
        int,
        "Return the log-probability of each token and of this number of alternatives. 0 returns no alternatives. "
        "Printed with --json only.",
        min=0,
    ),
    "json_schema": option(
        Path, "Constrain the output to JSON that conforms to this file's schema.", exists=True, dir_okay=False
    ),
    "regex": option(str, "Constrain the output to match this regular expression."),
    "allowed_texts": option(
        list[str],
        "Constrain the output to one of the texts given by this option. Repeatable.",
        "--allowed-text",
        metavar="TEXT",
    ),
    "grammar": option(
        Path, "Constrain the output to the grammar in this file, in Lark or GBNF format.", exists=True, dir_okay=False
    ),
    "adapter": option(str, "Use this LoRA adapter. Uses no adapter if omitted.", metavar="NAME"),
}
"""The sampling options, by the name of the argument of `AsyncClient.generate` that each option sets."""

PARAMETERS: Mapping[str, Parameter] = {
    "prompt": argument(
        str | None, "Send this prompt. A single - reads the prompt from standard input.", metavar="PROMPT"
    )._replace(default=None),
    **SERVER,
    "output": option(
        Path,
        "Write all audio, images, videos and tensors to files in this folder, named after their outputs, and download "
        "stored outputs to it. If omitted, only the files given by --audio and --image are written.",
        metavar="FOLDER",
    ),
    "audio": option(
        Path,
        "Write the audio output to this file as the audio arrives: as a WAV file, or as the pipeline has encoded it.",
        metavar="FILE",
    ),
    "image": option(
        Path, "Write the image or video output to this file. An existing file is replaced.", "--image", metavar="FILE"
    ),
    "outputs": option(
        str,
        "Produce only these outputs of the pipeline, separated by commas. Produces all if omitted.",
        metavar="NAMES",
    ),
    "attach": option(
        list[str],
        "Attach an image, audio or video file to the request, or a stored one by its URI, such as s3://bucket/key. "
        "Uploads a file that is too large for the request. The model receives it before the prompt. Repeatable.",
        metavar="FILE|URI",
    ),
    "messages": option(
        Path,
        "Send the conversation in this JSON file instead of a prompt: a list of messages with role, content, "
        "tool_calls and tool_call_id.",
        metavar="FILE",
        exists=True,
        dir_okay=False,
    ),
    "tools": option(
        Path,
        "Offer the model the tools in this JSON file: a list of functions with name, description and parameters.",
        metavar="FILE",
        exists=True,
        dir_okay=False,
    ),
    "template_arguments": option(
        str,
        'Set arguments of the model\'s chat template, as a JSON object such as {"enable_thinking": false}.',
        metavar="JSON",
    ),
    "raw": flag(
        "Send the prompt without applying the model's chat template. Attached files belong to the placeholders in the "
        "prompt.",
        "--raw",
    ),
    "negative_prompt": option(str, "Describe what generated images and videos must not show.", metavar="TEXT"),
    **_SAMPLING,
    "options": option(
        list[str],
        "Set an option that a stage of the pipeline declares, such as steps=20 or voice=alto. Double quotes make any "
        "value a text. Repeatable.",
        "--option",
        metavar="KEY=VALUE",
    ),
    "choices": option(
        int,
        "Run the request this number of times, each time with the next seed. Each text is printed once it is complete, "
        "and the number of the choice, from 0, is added to the name of each file, such as audio.1.wav. Runs it once if "
        "omitted.",
        min=1,
    ),
    "stage_parameters": option(
        list[str],
        "Set a parameter of one stage, such as talker.max_tokens=200 or talker.voice=alto. Takes precedence over the "
        "other options. Repeatable.",
        "--stage-parameter",
        metavar="STAGE.KEY=VALUE",
    ),
    "timeout": option(
        float,
        "Fail if the request takes longer than this number of seconds. There is no limit if omitted.",
        metavar="SECONDS",
    ),
    "wait": option(
        float,
        "Repeat the request for this number of seconds while no orchestrator can be reached. If omitted, the command "
        "fails after a few attempts.",
        default=0.0,
        min=0,
        metavar="SECONDS",
    ),
    "priority": option(
        int, "Set the priority, from -10 to 10. Requests of a higher priority leave the queue first.", default=0
    ),
    "caller": option(
        str,
        "Set the caller of the request. Callers receive equal shares of the pipeline's capacity. Requests without a "
        "caller count as one caller.",
        default="",
        metavar="NAME",
    ),
    "request_id": option(
        str, "Set the id that identifies the request in logs and admin commands. Random if omitted.", metavar="ID"
    ),
    "as_json": Parameter(AsJson, False),
}
_LISTS = frozenset({"stop", "stop_token_ids", "bad_words", "allowed_texts"})
_TEXTS = frozenset({"adapter", "json_schema", "regex", "grammar"})
# The parameters that are passed unchanged to the client.
_CLIENT_ARGUMENTS = {*_SAMPLING, "choices", "negative_prompt", "priority", "caller", "request_id", "template_arguments"}


def generate(**values: Any) -> None:
    """Send a prompt to a running pipeline. Print text to stdout and timings to stderr, and write other outputs to
    files.
    """
    from stagemesh.orchestrator.cli.output_sinks import Sinks

    as_json = values["as_json"]
    content, prompt_arguments = _read_prompt(values)
    arguments: GenerateArguments = {**client_arguments(values), **prompt_arguments}
    with Sinks(folder=values["output"], audio=values["audio"], image=values["image"], quiet=as_json) as sinks:
        endpoints = split_addresses(values["server"])
        result = asyncio.run(
            run_request(
                endpoints,
                content,
                arguments=arguments,
                timeout_s=values["timeout"],
                reach_s=values["wait"],
                sinks=sinks,
            )
        )
        sinks.download(result.choices, endpoints=endpoints)
    show_result(result, sinks, as_json=as_json)


def _read_prompt(values: Mapping[str, Any]) -> "tuple[Content | None, GenerateArguments]":
    """Returns the prompt, or None and the arguments of the client that replace it, and the tools.

    Raises BadParameter if the options contradict each other or if a file cannot be read.
    """
    from stagemesh.orchestrator.cli.attachments import read_attachments
    from stagemesh.orchestrator.cli.conversation_files import read_messages, read_tools

    prompt, messages = values["prompt"], values["messages"]
    if (prompt is None) == (messages is None):
        raise typer.BadParameter("give either a prompt or --messages", param_hint="PROMPT")
    arguments: GenerateArguments = {}
    if values["tools"] is not None:
        arguments["tools"] = read_tools(values["tools"])
    if messages is not None:
        if values["raw"] or values["attach"]:
            raise typer.BadParameter(
                "it contradicts --raw and --attach; name the files in the messages", param_hint="--messages"
            )
        arguments["messages"] = read_messages(messages)
        return None, arguments
    text: str = typer.get_text_stream("stdin").read() if prompt == "-" else prompt
    endpoints = split_addresses(values["server"])
    media = read_attachments(values["attach"] or (), endpoints=endpoints, quiet=values["as_json"])
    if values["raw"]:
        arguments |= {"raw_text": text, "media": media}
        return None, arguments
    return [*media, text] if media else text, arguments


def client_arguments(values: Mapping[str, Any]) -> "GenerateArguments":
    """Returns the arguments of `AsyncClient.generate` for the command's parameters that are set.

    `values` are the values of the command's parameters by name. Raises BadParameter if a file cannot be read or an
    option is malformed.
    """
    given = {name: value for name, value in values.items() if value not in (None, [], "") and value is not False}
    arguments = {name: value for name, value in given.items() if name in _CLIENT_ARGUMENTS}
    for name in arguments.keys() & {"json_schema", "grammar"}:
        arguments[name] = _read_text(given[name], option=f"--{name.replace('_', '-')}")
    if "outputs" in given:
        arguments["outputs"] = [name.strip() for name in given["outputs"].split(",")]
    if "options" in given:
        arguments["options"] = read_pairs(given["options"], option="--option", convert=_typed)
    if "stage_parameters" in given:
        arguments["stages"] = _stage_arguments(given["stage_parameters"])
    return cast("GenerateArguments", arguments)


def _typed(text: str) -> Any:
    """Returns the value of an option in its type: a number, a flag if the text is true or false, or else the text.

    Double quotes around the text make it a text in any case.
    """
    if len(text) > 1 and text[0] == text[-1] == '"':
        return text[1:-1]
    if text in {"true", "false"}:
        return text == "true"
    for convert in (int, float):
        with suppress(ValueError):
            return convert(text)
    return text


def _stage_arguments(texts: Sequence[str]) -> Mapping[str, "StageArguments"]:
    """Returns the parameters of single stages. Raises BadParameter if a text is not of the form STAGE.KEY=VALUE."""
    from stagemesh.client.requests import SamplingArguments

    known = SamplingArguments.__annotations__.keys()
    stages: dict[str, Any] = {}
    pairs = (read_pairs([text], option="--stage-parameter", convert=str) for text in texts)
    for key, value in chain.from_iterable(pair.items() for pair in pairs):
        stage, dot, name = key.partition(".")
        if not stage or not dot or not name:
            raise typer.BadParameter(f"{key!r} is not of the form STAGE.KEY", param_hint="--stage-parameter")
        given = stages.setdefault(stage, {})
        if name in _LISTS:
            given.setdefault(name, []).append(_typed(value) if name == "stop_token_ids" else value)
        elif name in _TEXTS:
            given[name] = value
        elif name in known or name == "chunk":
            given[name] = _typed(value)
        else:
            given.setdefault("options", {})[name] = _typed(value)
    return stages


def _read_text(path: Path | None, *, option: str) -> str | None:
    """Returns the text of the file at `path`, or None if `path` is None.

    Raises BadParameter if the file cannot be read as text. `option` is the command-line option that the error message
    names.
    """
    try:
        return path.read_text() if path is not None else None
    except (OSError, UnicodeDecodeError) as exc:
        raise typer.BadParameter(f"cannot read {path}: {exc}", param_hint=option) from exc


async def run_request(
    endpoints: Sequence[str],
    prompt: "Content | None",
    *,
    arguments: "GenerateArguments",
    timeout_s: float | None,
    sinks: "Sinks",
    reach_s: float = 0.0,
) -> "Result":
    """Runs a request until it finishes, and returns the result. Writes each event to `sinks` as it arrives.

    - `endpoints` are the addresses of orchestrators.
    - `arguments` are further arguments of `AsyncClient.generate`.
    - `timeout_s` is the time limit of the request in seconds. None means no limit.
    - `reach_s` is the number of seconds during which unreachable orchestrators are called again.
    """
    from stagemesh.client import AsyncClient, RetryPolicy
    from stagemesh.client.responses import ResultBuilder

    builder = ResultBuilder()
    async with AsyncClient(*endpoints, retry_policy=RetryPolicy(reach_s=reach_s)) as client:
        async for event in client.generate(prompt, timeout_s=timeout_s, **arguments):
            builder.add(event)
            sinks.write(event)
    return builder.build()


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
    return timings, make_table(edges, result.finished.edges)


def _describe_finish(finish: "OutputFinished", *, several: bool) -> str:
    choice = f" of choice {finish.index}" if several else ""
    stop = finish.stop_text if finish.stop_token_id is None else f"token {finish.stop_token_id}"
    detail = f" ({stop})" if finish.reason == "stop" else ""
    return f"output {finish.output}{choice} ended early: {finish.reason}{detail}"


def _output_ends(result: "Result") -> "Iterator[str]":
    """Yields a line for each output that a limit, a stop text or a failure ended."""
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


def _audio_s(result: "Result") -> float:
    return sum(audio.duration_s for choice in result.choices for audio in choice.audios.values())


def _real_time_factor(result: "Result") -> float | None:
    """Returns the request's total time divided by the playing time of the request's audio outputs of all choices.

    Returns None if there is no audio.
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
    return {
        "uri": file.uri,
        "media_type": file.media_type,
        "size_bytes": file.size_bytes,
        "sha256": file.sha256.hex(),
    }


def _document(result: "Result", sinks: "Sinks") -> dict[str, object]:
    from dataclasses import asdict

    choices = [_choice_document(result, index, sinks) for index in range(len(result.choices))]
    return {
        "request_id": result.request_id,
        **choices[0],
        **({"choices": choices} if len(choices) > 1 else {}),
        "first_text_s": result.first_text_s,
        "first_audio_s": result.first_audio_s,
        "first_image_s": result.first_image_s,
        "audio_s": _audio_s(result),
        "total_s": result.total_s,
        "real_time_factor": _real_time_factor(result),
        "edges": [asdict(edge) for edge in result.finished.edges],
    }


def _choice_document(result: "Result", index: int, sinks: "Sinks") -> dict[str, object]:
    """Returns the outputs of the choice with this index, and the reports of its stages, for JSON."""
    from dataclasses import asdict

    choice = result.choices[index]
    return {
        "seed": choice.seed,
        "texts": dict(choice.texts),
        "tokens": dict(choice.tokens),
        "logprobs": {output: [asdict(each) for each in logprobs] for output, logprobs in choice.logprobs.items()},
        "finishes": {output: asdict(each) for output, each in choice.finishes.items()},
        "files": {key[0]: [str(path) for path in paths] for key, paths in sinks.files.items() if key[1] == index},
        "stored": {output: [_stored(each) for each in files] for output, files in choice.files.items()},
        "stages": {name: asdict(report) for name, report in result.finished.choices[index].items()},
    }
