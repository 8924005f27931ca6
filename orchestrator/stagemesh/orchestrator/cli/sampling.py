"""The options of `generate` that say how tokens are picked."""

from pathlib import Path
from typing import Annotated

import typer

MaxTokens = Annotated[int | None, typer.Option(min=1, help="At most so many new tokens.")]
Temperature = Annotated[float | None, typer.Option(min=0.0, help="0 is greedy.")]
TopP = Annotated[float | None, typer.Option(help="Over 0, up to 1.")]
TopK = Annotated[int | None, typer.Option(min=0, help="The most probable so many tokens; 0 is all.")]
MinP = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Only tokens this times as probable as the first one.")
]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Over 0; 1 is none.")]
PresencePenalty = Annotated[float | None, typer.Option(min=-2.0, max=2.0, help="0 is none.")]
FrequencyPenalty = Annotated[float | None, typer.Option(min=-2.0, max=2.0, help="0 is none.")]
Seed = Annotated[int | None, typer.Option(min=0, help="Makes a repeat repeat; drawn when left out.")]
Stop = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Ends the output; may be given again.")]
StopToken = Annotated[list[int] | None, typer.Option(metavar="ID", min=0, help="Ends the output; may be given again.")]
MinTokens = Annotated[int | None, typer.Option(min=0, help="No token ends the output before so many.")]
IgnoreEnd = Annotated[bool, typer.Option("--ignore-eos", help="Go on where the model ends.")]
BadWord = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Is not to come; may be given again.")]
Logprobs = Annotated[
    int | None, typer.Option(min=0, help="Log-probabilities of tokens, with so many alternatives; --json shows them.")
]
JsonSchema = Annotated[
    Path | None, typer.Option(exists=True, dir_okay=False, help="The output is JSON that fulfils this file's schema.")
]
Regex = Annotated[str | None, typer.Option(help="The output matches this expression.")]
Choice = Annotated[list[str] | None, typer.Option(metavar="TEXT", help="The output is one of these; give several.")]
Grammar = Annotated[
    Path | None,
    typer.Option(exists=True, dir_okay=False, help="The output follows this file's grammar (Lark or GBNF)."),
]
Adapter = Annotated[str | None, typer.Option(metavar="NAME", help="The LoRA adapter to compute with.")]


def read_text(path: Path | None, *, option: str) -> str | None:
    """A file's text; what is none is a usage error."""
    try:
        return path.read_text() if path is not None else None
    except (OSError, UnicodeDecodeError) as exc:
        raise typer.BadParameter(f"cannot read {path}: {exc}", param_hint=option) from exc
