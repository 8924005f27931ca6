"""`stagemesh converse`: holds a conversation with a running pipeline."""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

import typer

from stagemesh.cli.requests.request_options import ADMISSION, CONTENT, SAMPLING, STAGES, client_arguments, typed_value
from stagemesh.cli.terminal.connection_options import SERVER
from stagemesh.cli.terminal.contexts import split_addresses
from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Kind, Parameters, flag, option, read_pairs, with_parameters

if TYPE_CHECKING:
    from stagemesh.client import ConverseArguments

_CONVERSE: Parameters = {
    **SERVER,
    "speak": flag(
        "Send each line to the stages at once, as a part of a single turn that ends with the input. For pipelines that "
        "speak text while it is written. If omitted, each line is a turn of its own.",
        "--speak",
    ),
    "microphone": option(
        Kind.INPUT_FILE,
        "Send the audio in this WAV file instead of lines, as fast as a microphone would record it. All of it is one "
        "turn, unless --turn-detection is set.",
    ),
    "turn_detection": flag("Let the pipeline find the ends of turns in the audio of --microphone.", "--turn-detection"),
    "interruptible": flag("Stop an answer when speech is detected. Implies --turn-detection.", "--interruptible"),
    "detection_options": option(
        [Kind.PAIR],
        "Set an option of the stage that detects turns, such as silence_ms=500. Implies --turn-detection. Repeatable.",
        "--detection-option",
    ),
    "system": option(Kind.TEXT, "Begin the conversation with these instructions for the model."),
    "audio": option(Kind.FILE, "Write the audio of all answers to this WAV file, one after the other, as it arrives."),
    "outputs": CONTENT["outputs"],
    "template_arguments": CONTENT["template_arguments"],
    **SAMPLING,
    **STAGES,
    "timeout": option(
        Kind.SECONDS,
        "Fail a turn if its answer takes longer than this number of seconds. Uses the server's limit if omitted.",
    ),
    **ADMISSION,
    "session_id": option(
        Kind.ID,
        "Set the id that identifies the session in logs. The request of turn N has the id ID.N. Random if omitted.",
    ),
    **AS_JSON,
}


@with_parameters(_CONVERSE)
def converse(**values: Any) -> None:
    """Hold a conversation with a running pipeline. Each line of standard input is a turn. Print the text of the answers
    to stdout. Ctrl-C interrupts an answer, and ends the conversation if there is none.
    """
    from stagemesh.cli.requests.conversation import Conversation
    from stagemesh.cli.requests.output_sinks import Sinks

    arguments, as_json = _arguments(values), values["as_json"]
    with Sinks(folder=None, audio=values["audio"], quiet=as_json) as sinks:
        conversation = Conversation(sinks, as_json=as_json)
        endpoints = split_addresses(values["server"])
        running = conversation.run(endpoints, arguments, microphone=values["microphone"], reach_s=values["wait"])
        status = asyncio.run(running)
    if status:
        raise typer.Exit(status)


def _arguments(values: Mapping[str, Any]) -> "ConverseArguments":
    """Returns the arguments of `AsyncClient.converse`. Raises BadParameter if options contradict each other."""
    arguments = cast("ConverseArguments", client_arguments(values))
    options = read_pairs(values["detection_options"], option="--detection-option", convert=typed_value)
    if values["turn_detection"] or values["interruptible"] or options:
        if values["microphone"] is None:
            raise typer.BadParameter("it needs --microphone", param_hint="--turn-detection")
        arguments["turn_detection"] = {"options": options, "interrupts": values["interruptible"]}
    if values["speak"]:
        arguments["input_mode"] = "stream"
    if values["system"] is not None:
        if values["speak"]:
            raise typer.BadParameter("streamed input has no instructions; omit --speak", param_hint="--system")
        arguments["messages"] = [("system", values["system"])]
    if values["timeout"] is not None:
        arguments["turn_timeout_s"] = values["timeout"]
    return arguments
