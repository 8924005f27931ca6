"""Says in one line what this machine lacks for the commands of the Makefile, before they begin.

    python3 tools/preflight.py           # what every command needs
    python3 tools/preflight.py TARGET    # also names the optional programs of a target's tests that are missing

Python 3.6 can run it, so that an old Python gets an answer, too.
"""

import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

SUPPORTED = (3, 11)
"""The version of Python for which the packages in requirements/ are locked."""
TOOLS = {"git": "git", "sed": "sed", "grep": "grep", "expand": "coreutils"}
"""The programs that make needs, and the packages that have them."""
_NPM = ("the client in TypeScript", "install Node.js 20 or newer")
OPTIONAL = {
    "test": {"npm": _NPM, "initdb": ("jobs in PostgreSQL", "install PostgreSQL")},
    "packages-check": {
        "npm": _NPM,
        "go": ("the clients in Go", "`make go` installs it for root on Debian"),
        "grpc_cpp_plugin": ("the stage in C++", "`make cpp` installs it for root on Debian"),
        "chromium": ("the page of the gateway", "`make browser` installs it for root on Debian"),
    },
}
"""The programs that some tests of a target need: what these tests are about, and what to do."""


def problem() -> "str | None":
    """Returns what is missing and what to do, or None."""
    if sys.version_info[:2] != SUPPORTED:
        needed, found = (".".join(map(str, version)) for version in (SUPPORTED, sys.version_info[:2]))
        return (
            f"Python {needed} is needed, because the packages in requirements/ are locked for it, and {sys.executable} "
            f"is {found}; install it, and run make with PYTHON=python{needed}"
        )
    if find_spec("venv") is None or find_spec("ensurepip") is None:
        return "Python lacks the module venv; on Debian and Ubuntu, install python3-venv"
    missing = sorted(package for tool, package in TOOLS.items() if shutil.which(tool) is None)
    if missing:
        return f"programs are missing; install the packages {' '.join(missing)}"
    return unwritable(Path.cwd(), "clone the repository into a folder that you may write to") or unwritable(
        home(), "set STAGEMESH_HOME to a folder for models and logs"
    )


def home() -> Path:
    """Returns the folder of models and logs, as `stagemesh` chooses it."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("STAGEMESH_HOME") or cache / "stagemesh")


def unwritable(folder: Path, remedy: str) -> "str | None":
    """Returns why a folder cannot be written to, and the remedy, or None if it can."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=str(folder)):
            return None
    except OSError as exc:
        return f"{folder} cannot be written to ({exc.strerror}); {remedy}"


def is_installed(program: str) -> bool:
    """Returns whether a program is installed. Debian does not add the programs of PostgreSQL to the path."""
    return shutil.which(program) is not None or (program == "initdb" and Path("/usr/lib/postgresql").is_dir())


def main() -> int:
    """Prints the problem, or the optional programs that are missing. Returns the exit code."""
    found = problem()
    if found:
        print(f"make: {found}", file=sys.stderr)
        return 1
    for target in sys.argv[1:]:
        for program, (subject, remedy) in OPTIONAL.get(target, {}).items():
            if not is_installed(program):
                print(f"{program} is not installed: tests of {subject} are skipped; {remedy}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
