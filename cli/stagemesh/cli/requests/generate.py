"""`stagemesh generate` and `stagemesh cancel`: send one request, and stop one."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.cli.requests.request_options import ADMISSION, CONTENT, SAMPLING, STAGES, client_arguments
from stagemesh.cli.requests.result_output import show_result
from stagemesh.cli.terminal.connection_options import SERVER, open_client
from stagemesh.cli.terminal.contexts import split_addresses
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Kind, Parameters, argument, flag, option, with_parameters
from stagemesh.cli.terminal.output import print_result

if TYPE_CHECKING:
    from stagemesh.cli.requests.output_sinks import Sinks
    from stagemesh.client import Content, GenerateArguments, Result


GENERATE: Parameters = {
    "prompt": argument(
        str | None, "Send this prompt. A single - reads the prompt from standard input.", metavar="PROMPT"
    )._replace(default=None),
    **SERVER,
    "output": option(
        Kind.FOLDER,
        "Write all audio, images, videos and tensors to files in this folder, named after their outputs, and download "
        "stored outputs to it. If omitted, only the files given by --audio and --image are written.",
    ),
    "audio": option(
        Kind.FILE,
        "Write the audio output to this file as the audio arrives: as a WAV file, or as the pipeline has encoded it.",
    ),
    "image": option(
        Kind.FILE, "Write the image or video output to this file. An existing file is replaced.", "--image"
    ),
    "attach": option(
        list[str],
        "Attach an image, audio or video file to the request, or a stored one by its URI, such as s3://bucket/key. "
        "Uploads a file that is too large for the request. The model receives it before the prompt. Repeatable.",
        metavar="FILE|URI",
    ),
    "messages": option(
        Kind.INPUT_FILE,
        "Send the conversation in this JSON file instead of a prompt: a list of messages with role, content, "
        "tool_calls and tool_call_id.",
    ),
    "raw": flag(
        "Send the prompt without applying the model's chat template. Attached files belong to the placeholders in the "
        "prompt.",
        "--raw",
    ),
    "negative_prompt": option(Kind.TEXT, "Describe what generated images and videos must not show."),
    **CONTENT,
    **SAMPLING,
    **STAGES,
    "choices": option(
        int,
        "Run the request this number of times, each time with the next seed. Each text is printed once it is complete, "
        "and the number of the choice, from 0, is added to the name of each file, such as audio.1.wav. Runs it once if "
        "omitted.",
        min=1,
    ),
    "timeout": option(
        Kind.SECONDS, "Fail if the request takes longer than this number of seconds. There is no limit if omitted."
    ),
    **ADMISSION,
    "request_id": option(
        Kind.ID, "Set the id that identifies the request in logs and admin commands. Random if omitted."
    ),
    **AS_JSON,
}


@with_parameters(GENERATE)
def generate(**values: Any) -> None:
    """Send a prompt to a running pipeline. Print text to stdout and timings to stderr, and write other outputs to
    files.
    """
    from stagemesh.cli.requests.output_sinks import Sinks

    as_json = values["as_json"]
    content, arguments = read_prompt(values)
    with Sinks(folder=values["output"], audio=values["audio"], image=values["image"], quiet=as_json) as sinks:
        endpoints = split_addresses(values["server"])
        request = run_request(
            endpoints, content, arguments=arguments, timeout_s=values["timeout"], reach_s=values["wait"], sinks=sinks
        )
        result = asyncio.run(request)
        sinks.download(result.choices, endpoints=endpoints)
    show_result(result, sinks, as_json=as_json)


def read_prompt(values: Mapping[str, Any]) -> "tuple[Content | None, GenerateArguments]":
    """Returns the prompt, and the other arguments of the client. The prompt is None if one of them replaces it.

    Raises BadParameter if the options contradict each other or if a file cannot be read.
    """
    from stagemesh.cli.requests.request_files import read_attachments, read_messages, read_tools

    prompt, messages = values["prompt"], values["messages"]
    if (prompt is None) == (messages is None):
        raise typer.BadParameter("give either a prompt or --messages", param_hint="PROMPT")
    arguments = client_arguments(values)
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


_CANCEL: Parameters = {"request_id": argument(Kind.ID, "Cancel the request with this id."), **SERVER, **AS_JSON}


@with_parameters(_CANCEL)
def cancel(**values: Any) -> None:
    """Cancel a request. Return after every stage has released it."""
    request_id = values["request_id"]
    with open_client(values) as client:
        client.cancel(request_id)
    document = {"request_id": request_id, "cancelled": True}
    print_result(document, f"cancelled {request_id}", as_json=values["as_json"])
