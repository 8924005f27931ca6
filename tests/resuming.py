"""`pytest --resume` leaves out the tests that passed with the same files, so that a long run can be continued."""

import hashlib
import subprocess
from pathlib import Path

import pytest

_GIT = ("git",)
_ROOT = Path(__file__).parents[1]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of the longer targets of the Makefile."""
    parser.addoption("--resume", action="store_true", help="leave out tests that passed with the same files")


def pytest_configure(config: pytest.Config) -> None:
    """Begins to note the tests that pass. Each process leaves them out, and one notes them."""
    if config.getoption("--resume"):
        config.pluginmanager.register(_Passed(config))


class _Passed:
    def __init__(self, config: pytest.Config) -> None:
        assert config.cache is not None, "--resume needs pytest's cache"
        self._notes = config.cache.mkdir("resume") / _version()
        self._notes.touch()
        self._is_writer = not hasattr(config, "workerinput")

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        passed = set(self._notes.read_text().splitlines())
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in passed])
        items[:] = [item for item in items if item.nodeid not in passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self._is_writer and report.when == "call" and report.passed:
            with self._notes.open("a") as file:
                file.write(f"{report.nodeid}\n")


def _version() -> str:
    """Returns a digest of all files of the repository, with the changes that are not committed."""
    digest = hashlib.sha256()
    for command in ("rev-parse HEAD^{tree}", "diff HEAD --binary", "ls-files --others -z --exclude-standard"):
        done = subprocess.run([*_GIT, *command.split()], cwd=_ROOT, capture_output=True, check=True)
        digest.update(done.stdout)
    return digest.hexdigest()[:16]
