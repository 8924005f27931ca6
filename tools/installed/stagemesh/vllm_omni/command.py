"""`stagemesh pipeline import`: converts a config of vLLM-Omni to a pipeline file."""

from pathlib import Path

import typer

from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Kind, Parameters, argument, option, with_parameters
from stagemesh.cli.terminal.output import print_json
from stagemesh.common.errors import ExitCode, writing

_IMPORT: Parameters = {
    "file": argument(Kind.INPUT_FILE, "Read this stage config or deploy config of vLLM-Omni."),
    "output": option(Kind.FILE, "Write the pipeline to this file.", "--output", "-o", show_default="standard output"),
    "model": option(
        str,
        "Set the model of all stages: a name or a path.",
        show_default="the variable STAGEMESH_MODEL, with the usual checkpoint as its default",
    ),
    "name": option(str, "Set the name of the pipeline.", show_default="the name of FILE"),
    "topology": option(
        str, "Set the graph of stages of a deploy config that does not name it, for example qwen3_omni_moe."
    ),
    **AS_JSON,
}


@with_parameters(_IMPORT)
def import_file(
    *, file: Path, output: Path | None, model: str | None, name: str | None, topology: str | None, as_json: bool
) -> None:
    """Convert a config of vLLM-Omni to a pipeline file, and list the keys that are not converted."""
    from stagemesh.vllm_omni.keys import Outcome
    from stagemesh.vllm_omni.pipeline_file import import_config

    imported = import_config(file, model=model, name=name, topology=topology)
    found = {outcome: imported.report.items(outcome) for outcome in Outcome}
    if output is not None and imported.pipeline is not None:
        with writing(output, remedy="; set --output to another file"):
            output.write_text(imported.dump(), encoding="utf-8")
    if as_json:
        lists = {
            outcome.name.lower(): [{"path": item.path, "message": item.text} for item in items]
            for outcome, items in found.items()
        }
        print_json({"pipeline": imported.pipeline, "file": imported.dump(), **lists})
    else:
        if output is None:
            typer.echo(imported.dump(), nl=False)
        for outcome, items in found.items():
            for item in items:
                typer.echo(f"{outcome.value}: {item.path}: {item.text}", err=True)
    if imported.pipeline is None:
        raise typer.Exit(ExitCode.FAILED)
