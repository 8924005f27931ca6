"""The store of fetched models on disk. A model's folder is always complete and contains a manifest with its source."""

import fcntl
import json
import os
import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from stagemesh.common.errors import NotReadyError
from stagemesh.services.models.catalog import Recipe

_MANIFEST = "stagemesh.json"


class ModelStore:
    """The folder that contains all fetched models."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, recipe: Recipe) -> Path:
        """Returns the path of a model's folder. The folder exists only if the model is present."""
        return self.root / recipe.model

    def has(self, recipe: Recipe) -> bool:
        """Returns whether a model is present and complete, and was built by this recipe."""
        folder = self.path(recipe)
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
        except (OSError, ValueError):
            return False
        return bool(manifest == _describe(folder, recipe))

    def require_space(self, recipe: Recipe) -> None:
        """Raises NotReadyError unless the disk has enough free space to fetch a model."""
        self.root.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self.root).free < recipe.disk_bytes:
            raise disk_full(self.root, recipe)

    @contextmanager
    def create(self, recipe: Recipe) -> Generator[Path]:
        """Yields a work folder in which the caller builds a model in the subfolder `model`.

        If no error is raised until the context exits, this subfolder becomes the model's folder. Deletes the rest of
        the work folder in any case.
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
        if final.exists():
            final.rename(old)
        made.rename(final)

    @contextmanager
    def exclusive(self) -> Generator[None]:
        """Locks the store's folder until the context exits, so that only one process fetches models. Waits for the
        lock.
        """
        self.root.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.root / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def disk_full(root: Path, recipe: Recipe) -> NotReadyError:
    """Returns the error for a disk without enough free space."""
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
