"""Files that only the user can read, such as keys and tokens."""

import os
import tempfile
from pathlib import Path


def write_private(path: Path, content: bytes) -> None:
    """Replaces the file at `path` atomically. Creates its folder if necessary. Only the user can read the new file.

    Raises OSError if the file cannot be written. The earlier file then remains.
    """
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    # The file has mode 0600 from the start.
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
