"""The options of `generate` that control how language models choose tokens."""

from collections.abc import Mapping
from pathlib import Path

import typer

from stagemesh.orchestrator.cli.parameters import Parameter, option

SAMPLING: Mapping[str, Parameter] = {
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
        "Sample only from this number of most probable tokens. 0 means all tokens. Uses the model's default if "
        "omitted.",
        min=0,
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
        "Penalize tokens that occur in the output, by this amount regardless of how often. Negative values encourage "
        "them, 0 has no effect. Uses the model's default if omitted.",
        min=-2.0,
        max=2.0,
    ),
    "frequency_penalty": option(
        float,
        "Penalize tokens by this amount for each time they occur in the output. Negative values encourage them, 0 "
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
        int, "Do not end the output before this number of tokens. 0 sets no minimum. Uses 0 if omitted.", min=0
    ),
    "ignore_eos": option(
        bool, "Continue generating after the model's end-of-sequence token.", "--ignore-eos", default=False
    ),
    "bad_words": option(list[str], "Set a text that must not be generated. Repeatable.", "--bad-word", metavar="TEXT"),
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
    "choice": option(
        list[str], "Constrain the output to one of the texts given by this option. Repeatable.", metavar="TEXT"
    ),
    "grammar": option(
        Path, "Constrain the output to the grammar in this file, in Lark or GBNF format.", exists=True, dir_okay=False
    ),
    "adapter": option(str, "Use this LoRA adapter. The model is used without an adapter if omitted.", metavar="NAME"),
}
"""The options, by the name of the argument of `AsyncClient.generate` that each option sets."""


def read_text(path: Path | None, *, option: str) -> str | None:
    """Returns the text of the file at `path`, or None if `path` is None.

    Raises BadParameter, which names `option`, if the file cannot be read as text.
    """
    try:
        return path.read_text() if path is not None else None
    except (OSError, UnicodeDecodeError) as exc:
        raise typer.BadParameter(f"cannot read {path}: {exc}", param_hint=option) from exc
