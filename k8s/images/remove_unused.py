"""Removes what the images without torch never import: their Dockerfiles run it in the environment that they install.

python3 remove_unused.py FOLDER

It needs the program `strip` of binutils.
"""

import re
import subprocess
import sys
from pathlib import Path

_UNUSED = re.compile(
    # The tests of numpy are 17 MB.
    r"/tests/"
    # Compilers of extensions in C and Fortran.
    r"|/numpy/(distutils|f2py)/"
    # Only numpy's tests import it.
    r"|/numpy/_core/_simd\.[^/]+\.so$"
    # Sources and type stubs of compiled modules.
    r"|\.(a|c|h|pxd|pyi|pyx)$"
    # Rich colors code blocks with these, which the command line does not print.
    r"|/pygments/lexers/(__pycache__/)?(?!__init__|_mapping|python)[^/]+\.pyc?$"
)
_WITH_DEBUG_INFORMATION = ("uvloop/*.so", "yaml/*.so")
"""Libraries that consist mainly of debug information, 14 MB together."""


def is_unused(path: str) -> bool:
    """Returns whether the images need no file with this path, which is relative to a folder of packages."""
    return _UNUSED.search(f"/{path}") is not None


def remove_unused(folder: Path) -> None:
    """Removes the unused files below a folder, and the debug information of libraries."""
    for path in folder.rglob("*"):
        if path.is_file() and is_unused(path.relative_to(folder).as_posix()):
            path.unlink()
    libraries = [path for pattern in _WITH_DEBUG_INFORMATION for path in folder.rglob(pattern)]
    command = ["strip", "--strip-debug", *map(str, libraries)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    remove_unused(Path(sys.argv[1]))
