"""Runs the tests of the repository in clones whose folders have names that have broken them.

python -m tools.clone_check [PYTEST_ARGUMENT ...]

It clones the last commit into folders called `stagemesh`, `a b` and `ä`. By default, it runs in each those files of
tests/repository that read the tree and start no mkdocs, wheel or stage. They import the clone, and the packages of the
environment that runs this program.
"""

import os
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("stagemesh", "a b", "ä")
QUICK = tuple(
    f"tests/repository/test_{name}.py"
    for name in (
        *("contract", "docs_examples", "environment_readers", "error_catalogue", "layers", "limits", "prose_lint"),
        *("readme", "requirements"),
    )
)


def clone(folder: Path, root: Path = ROOT) -> None:
    """Clones the last commit of a repository into a folder that does not exist."""
    command = ["git", "clone", "--quiet", "--no-tags", str(root), str(folder)]
    subprocess.run(command, check=True)


def run_tests(folder: Path, arguments: list[str]) -> int:
    """Runs pytest in a clone, and returns its exit status."""
    project = tomllib.loads((folder / "pyproject.toml").read_text())
    sources = [str(folder / source) for source in project["tool"]["hatch"]["build"]["dev-mode-dirs"]]
    command = [sys.executable, "-m", "pytest", "--quiet", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sources)}
    return subprocess.run(command, cwd=folder, env=environment, check=False).returncode


def main(arguments: list[str]) -> int:
    """Runs the tests in each folder. Returns 1 if a test fails in one of them."""
    failed = list[str]()
    with tempfile.TemporaryDirectory() as temporary:
        for name in FOLDERS:
            print(f"in a clone called {name}:", flush=True)
            folder = Path(temporary) / name
            clone(folder)
            if run_tests(folder, arguments or list(QUICK)) != 0:
                failed.append(name)
    if failed:
        print(f"failed in a clone called {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
