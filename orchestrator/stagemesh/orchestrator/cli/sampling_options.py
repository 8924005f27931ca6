"""The options of `generate` that control how language models choose tokens."""

from pathlib import Path
from typing import Annotated

import typer

MaxTokens = Annotated[
    int | None, typer.Option(min=1, help="Generate at most this number of tokens. Uses the model's default if omitted.")
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        help="Scale the randomness of sampling: 0 always chooses the most probable token, 1 samples from the model's "
        "own distribution. Uses the model's default if omitted.",
    ),
]
TopP = Annotated[
    float | None,
    typer.Option(
        help="Sample only from the most probable tokens whose probabilities add up to this fraction, above 0 and at "
        "most 1. Uses the model's default if omitted."
    ),
]
TopK = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Sample only from this number of most probable tokens. 0 means all tokens. Uses the model's default if "
        "omitted.",
    ),
]
MinP = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Drop tokens less probable than this fraction of the most probable token's probability. 0 drops none. "
        "Uses the model's default if omitted.",
    ),
]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option(
        help="Penalize tokens that occur in the prompt or in the output: values above 1 discourage them, values "
        "between 0 and 1 encourage them, 1 has no effect. Uses the model's default if omitted."
    ),
]
PresencePenalty = Annotated[
    float | None,
    typer.Option(
        min=-2.0,
        max=2.0,
        help="Penalize tokens that occur in the output, by this amount regardless of how often. Negative values "
        "encourage them, 0 has no effect. Uses the model's default if omitted.",
    ),
]
FrequencyPenalty = Annotated[
    float | None,
    typer.Option(
        min=-2.0,
        max=2.0,
        help="Penalize tokens by this amount for each time they occur in the output. Negative values encourage them, "
        "0 has no effect. Uses the model's default if omitted.",
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(min=0, help="Set the random seed. The same seed reproduces the output. Chosen at random if omitted."),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT", help="End the output when this text is generated. The text itself is not printed. Repeatable."
    ),
]
StopToken = Annotated[
    list[int] | None,
    typer.Option(metavar="ID", min=0, help="End the output when the token with this id is generated. Repeatable."),
]
MinTokens = Annotated[
    int | None,
    typer.Option(
        min=0, help="Do not end the output before this number of tokens. 0 sets no minimum. Uses 0 if omitted."
    ),
]
IgnoreEnd = Annotated[
    bool, typer.Option("--ignore-eos", help="Continue generating after the model's end-of-sequence token.")
]
BadWord = Annotated[
    list[str] | None, typer.Option(metavar="TEXT", help="Set a text that must not be generated. Repeatable.")
]
Logprobs = Annotated[
    int | None,
    typer.Option(
        min=0,
        help="Return the log-probability of each token and of this number of alternatives. 0 returns no "
        "alternatives. Printed with --json only.",
    ),
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="Constrain the output to JSON that conforms to this file's schema."),
]
Regex = Annotated[str | None, typer.Option(help="Constrain the output to match this regular expression.")]
Choice = Annotated[
    list[str] | None,
    typer.Option(metavar="TEXT", help="Constrain the output to one of the texts given by this option. Repeatable."),
]
Grammar = Annotated[
    Path | None,
    typer.Option(
        exists=True, dir_okay=False, help="Constrain the output to the grammar in this file, in Lark or GBNF format."
    ),
]
Adapter = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Use this LoRA adapter. The model is used without an adapter if omitted."),
]


def read_text(path: Path | None, *, option: str) -> str | None:
    """Returns the text of the file that `option` names. Raises BadParameter if it cannot be read as text."""
    try:
        return path.read_text() if path is not None else None
    except (OSError, UnicodeDecodeError) as exc:
        raise typer.BadParameter(f"cannot read {path}: {exc}", param_hint=option) from exc
