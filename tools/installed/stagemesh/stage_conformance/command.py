"""`stagemesh conformance`: checks a running stage of any language against the protocol of stages."""

import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stagemesh.cli.terminal.options import (
    Kind,
    Parameters,
    argument,
    flag,
    in_panel,
    option,
    read_pairs,
    with_parameters,
)
from stagemesh.cli.terminal.output import print_all, print_json
from stagemesh.cli.terminal.tables import fields, make_table, numbers
from stagemesh.common.errors import ExitCode, writing

if TYPE_CHECKING:
    from stagemesh.stage_conformance.cases import Case, Result
    from stagemesh.stage_conformance.driver import Outcome
    from stagemesh.v1.tensor_pb2 import TypedValue

_PROGRESS_S = 2.0
_STDOUT = "-"
_CONFORMANCE: Parameters = {
    "address": argument(str, "Check the stage process at this address.", metavar="HOST:PORT", default=""),
    "stage": option(Kind.NAME, "Fail if the process serves another stage than this one.", default=""),
    "patterns": option(
        [str],
        "Run only the cases whose names match this pattern, for example 'consumer.*'. Repeatable. Runs all cases if "
        "omitted.",
        "--case",
        metavar="PATTERN",
    ),
    "level": option(
        int,
        "Run the cases up to this level. 1 is the minimum profile, 2 adds CancelStep and RebindStep, and 3 adds the "
        "rest.",
        default=3,
        min=1,
        max=3,
    ),
    "list_only": flag("List the cases with their levels and rules, and run none.", "--list"),
    "timeout": option(
        Kind.SECONDS, "Fail a case that takes longer than this number of seconds.", default=60.0, min=1.0
    ),
    "json_path": option(
        str,
        "Write the results as JSON to this file. - writes them to standard output instead of the text.",
        "--json",
        metavar="FILE|-",
    ),
    **in_panel(
        "Requests to the stage",
        {
            "inputs": option(
                [Kind.PAIR],
                "Send this content for an accepted tensor: a type such as codes=int64\\[frames, 8], or the path of "
                "an .npy file with its rows. Repeatable. Generates content for the types in the stage's signature if "
                "omitted.",
                "--input",
            ),
            "options": option([Kind.PAIR], "Set an option of the stage in each request. Repeatable.", "--option"),
            "prompt": option(
                Kind.TEXT,
                "Send this prompt to a stage without incoming edges.",
                default="Tell me three things about the ocean.",
            ),
            "max_tokens": option(
                int, "Ask a stage that chooses tokens for at most this number of tokens.", default=32, min=1
            ),
            "client_only": flag("Bind no outgoing edges: the stage's outputs are for clients alone.", "--client-only"),
        },
    ),
    **in_panel(
        "Connection",
        {
            "host": option(
                str,
                "Set the name or the address at which the stage reaches this machine.",
                default="127.0.0.1",
                metavar="HOST",
            ),
            "tls": option(
                str,
                "Connect by TLS. The folder contains ca.crt, and tls.crt and tls.key, a certificate with the names "
                "orchestrator/NAME and stage/NAME/conformance*.",
                metavar="FOLDER",
            ),
        },
    ),
}


@with_parameters(_CONFORMANCE)
def conformance(**values: Any) -> None:
    """Check a running stage against the protocol of stages: play its orchestrator, its producer and its consumer.

    Exit with status 1 if a case fails. Cases that need a method which the stage does not serve do not fail.
    """
    from stagemesh.stage_conformance.cases import Verdict, select
    from stagemesh.stage_conformance.suites import register_cases

    register_cases()
    cases = [each for each in select(values["patterns"] or ()) if each.level <= values["level"]]
    if not cases:
        text = "no case matches; `stagemesh conformance --list` lists them"
        raise typer.BadParameter(text, param_hint="--case")
    if values["list_only"]:
        _list(cases, values["json_path"])
        return
    if not values["address"]:
        raise typer.BadParameter("give the address of the stage, HOST:PORT, or --list", param_hint="HOST:PORT")
    outcome = _run(cases, values)
    _write(values["json_path"], _document(outcome))
    if values["json_path"] != _STDOUT:
        _show(outcome)
    if any(each.verdict is Verdict.FAILED for each in outcome.results):
        raise typer.Exit(ExitCode.FAILED)


def _run(cases: "Sequence[Case]", values: dict[str, Any]) -> "Outcome":
    import uvloop

    from stagemesh.rpc.credentials import PROCESS, Credentials
    from stagemesh.stage_conformance.driver import Settings, check_stage

    settings = Settings(
        stage=values["stage"],
        inputs=read_pairs(values["inputs"], option="--input", convert=str),
        options=read_pairs(values["options"], option="--option", convert=_typed),
        prompt=values["prompt"],
        max_tokens=values["max_tokens"],
        has_output=not values["client_only"],
        host=values["host"],
        limit_s=values["timeout"],
    )
    PROCESS.use(Credentials(values["tls"] or None))
    return uvloop.run(check_stage(values["address"], cases, settings, _progress(len(cases))))


def _typed(text: str) -> "TypedValue":
    """Returns the value of an option: a truth value, a number or a text, as it is written."""
    from stagemesh.v1.tensor_pb2 import TypedValue

    try:
        value = json.loads(text)
    except ValueError:
        value = text
    match value:
        case bool():
            return TypedValue(flag=value)
        case int():
            return TypedValue(integer=value)
        case float():
            return TypedValue(number=value)
        case _:
            return TypedValue(text=text)


def _progress(total: int) -> "Callable[[Result, int], None]":
    """Returns a function that prints each failure at once, and now and then how many cases have run."""
    shown_s = time.monotonic()

    def show(result: "Result", count: int) -> None:
        nonlocal shown_s
        if result.verdict.value == "failed":
            typer.echo(f"failed: {result.case.name}", err=True)
        if time.monotonic() - shown_s > _PROGRESS_S or count == total:
            shown_s = time.monotonic()
            typer.echo(f"{count} of {total} cases", err=True)

    return show


def _list(cases: "Sequence[Case]", json_path: str | None) -> None:
    _write(json_path, [_described(each) for each in cases])
    if json_path != _STDOUT:
        print_all(make_table([*fields("name"), *numbers("level"), *fields("plays", "rule")], cases))


def _described(case: "Case") -> dict[str, object]:
    return {"name": case.name, "level": case.level, "plays": case.plays, "rule": case.rule}


def _document(outcome: "Outcome") -> dict[str, object]:
    described = outcome.described
    identity = {
        name: getattr(described, name) for name in ("pipeline", "generation", "stage", "replica", "incarnation")
    }
    results = [
        {
            **_described(each.case),
            "verdict": each.verdict.value,
            "seconds": round(each.seconds, 3),
            "expected": each.expected,
            "came": each.came,
            "logs": each.logs,
        }
        for each in outcome.results
    ]
    return {
        "event": "conformance",
        **identity,
        "software": described.protocol.software,
        "counts": Counter(each.verdict.value for each in outcome.results),
        "cases": results,
    }


def _write(json_path: str | None, document: object) -> None:
    if json_path == _STDOUT:
        print_json(document)
    elif json_path:
        with writing(Path(json_path)):
            Path(json_path).write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")


def _show(outcome: "Outcome") -> None:
    for each in outcome.results:
        if each.verdict.value == "failed":
            typer.echo(f"\n{each.case.name} (level {each.case.level})")
            logs = {name: "; ".join(lines) for name, lines in each.logs.items() if lines}
            rows = {"rule": each.case.rule, "expected": each.expected, "came": each.came, **logs}
            for name, text in rows.items():
                typer.echo(f"  {name + ':':12}{text}")
    counts = Counter(each.verdict.value for each in outcome.results)
    sys.stdout.write("\n")
    typer.echo(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
