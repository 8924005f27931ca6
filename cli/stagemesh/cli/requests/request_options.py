"""The options with which several commands describe requests: sampling, options of stages, outputs and callers."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import typer

from stagemesh.cli.terminal.options import Kind, Parameters, flag, option, read_pairs

if TYPE_CHECKING:
    from stagemesh.client import GenerateArguments, StageArguments

SAMPLING: Parameters = {
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
        [Kind.TEXT], "End the output when this text is generated. The text itself is not printed. Repeatable."
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
    "bad_words": option([Kind.TEXT], "Prevent this text from being generated. Repeatable.", "--bad-word"),
    "logprobs": option(
        int,
        "Return the log-probability of each token and of this number of alternatives. 0 returns no alternatives. "
        "Printed with --json only.",
        min=0,
    ),
    "prompt_logprobs": option(
        int,
        "Return the log-probability of each token of the prompt and of this number of alternatives. 0 returns no "
        "alternatives. Printed with --json only.",
        min=0,
    ),
    "json_schema": option(Kind.INPUT_FILE, "Constrain the output to JSON that conforms to this file's schema."),
    "regex": option(str, "Constrain the output to match this regular expression."),
    "allowed_texts": option(
        [Kind.TEXT], "Constrain the output to one of the texts given by this option. Repeatable.", "--allowed-text"
    ),
    "grammar": option(Kind.INPUT_FILE, "Constrain the output to the grammar in this file, in Lark or GBNF format."),
    "adapter": option(Kind.NAME, "Use this LoRA adapter. Uses no adapter if omitted."),
}
"""The sampling options, by the name of the argument of `AsyncClient.generate` that each option sets."""


CONTENT: Parameters = {
    "outputs": option(
        str,
        "Produce only these outputs of the pipeline, separated by commas. Produces all if omitted.",
        metavar="NAMES",
    ),
    "tools": option(
        Kind.INPUT_FILE,
        "Offer the model the tools in this JSON file: a list of functions with name, description and parameters.",
    ),
    "template_arguments": option(
        str,
        'Set arguments of the model\'s chat template, as a JSON object such as {"enable_thinking": false}.',
        metavar="JSON",
    ),
}
"""The options for outputs and tools."""

STAGES: Parameters = {
    "options": option(
        [Kind.PAIR],
        "Set an option that a stage of the pipeline declares, such as steps=20 or voice=alto. Double quotes make any "
        "value a text. Repeatable.",
        "--option",
    ),
    "stage_parameters": option(
        list[str],
        "Set a parameter of one stage, such as talker.max_tokens=200 or talker.voice=alto. Takes precedence over the "
        "other options. Repeatable.",
        "--stage-parameter",
        metavar="STAGE.KEY=VALUE",
    ),
}
"""The options for the parameters of stages."""

ADMISSION: Parameters = {
    "wait": option(
        Kind.SECONDS,
        "Repeat the call for this number of seconds while no orchestrator can be reached. If omitted, the command "
        "fails after a few attempts.",
        default=0.0,
        min=0,
    ),
    "priority": option(
        int, "Set the priority, from -10 to 10. Requests of a higher priority leave the queue first.", default=0
    ),
    "caller": option(
        Kind.NAME,
        "Set the name of the caller. Callers receive equal shares of the pipeline's capacity. Requests without a "
        "caller count as one caller.",
        default="",
    ),
}
"""The options for reaching an orchestrator and for the order of its queue."""

_LISTS = frozenset({"stop", "stop_token_ids", "bad_words", "allowed_texts"})
_TEXTS = frozenset({"adapter", "json_schema", "regex", "grammar"})
# The parameters that are passed unchanged to the client.
_CLIENT_ARGUMENTS = frozenset(
    {*SAMPLING, "caller", "choices", "negative_prompt", "priority", "request_id", "session_id", "template_arguments"}
)


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
        arguments["options"] = read_pairs(given["options"], option="--option", convert=typed_value)
    if "stage_parameters" in given:
        arguments["stages"] = _stage_arguments(given["stage_parameters"])
    return cast("GenerateArguments", arguments)


def typed_value(text: str) -> Any:
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
            given.setdefault(name, []).append(typed_value(value) if name == "stop_token_ids" else value)
        elif name in _TEXTS:
            given[name] = value
        elif name in known or name == "chunk":
            given[name] = typed_value(value)
        else:
            given.setdefault("options", {})[name] = typed_value(value)
    return stages


def _read_text(path: Path, *, option: str) -> str:
    """Returns the text of the file at `path`.

    Raises BadParameter if the file cannot be read as text. `option` is the command-line option that the error message
    names.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise typer.BadParameter(f"cannot read {path}: {exc}", param_hint=option) from exc
