"""Models on disk: a folder is there whole or not at all, and its manifest says what it was made from."""

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
    """The folder that holds the models that were fetched."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def path(self, recipe: Recipe) -> Path:
        """Where a model is, once it is there."""
        return self.root / recipe.model

    def has(self, recipe: Recipe) -> bool:
        """Whether a model is there, whole, and made by this recipe."""
        folder = self.path(recipe)
        try:
            manifest = json.loads((folder / _MANIFEST).read_text())
        except (OSError, ValueError):
            return False
        return bool(manifest == _describe(folder, recipe))

    def require_space(self, recipe: Recipe) -> None:
        """Raises NotReadyError unless the disk has room to fetch a model."""
        self.root.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(self.root).free < recipe.disk_bytes:
            raise disk_full(self.root, recipe)

    @contextmanager
    def making(self, recipe: Recipe) -> Generator[Path]:
        """An empty folder to work in. What is put into its subfolder `model` becomes the model when the block ends
        well; however it ends, nothing else stays."""
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
        """Waits until no other process fetches into this folder."""
        self.root.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.root / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
        finally:
            os.close(lock)


def disk_full(root: Path, recipe: Recipe) -> NotReadyError:
    """The error for a disk without room."""
    return NotReadyError(
        f"not enough space for {recipe.model} in {root}: {recipe.disk_bytes >> 20} MB must be free; "
        "free some, or set STAGEMESH_HOME to a folder on another disk",
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
