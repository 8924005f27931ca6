"""The store of fetched models on disk.

A model's folder is always complete and contains a manifest of the model's source.
"""

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
        """Raises NotReadyError if the disk does not have enough free space to fetch a model."""
        self.root.mkdir(parents=True, exist_ok=True)
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
