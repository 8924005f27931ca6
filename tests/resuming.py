"""`pytest --resume` leaves out the tests that passed with the same files, so that a long run can be continued."""

import hashlib
import os
import subprocess
from pathlib import Path

import pytest

_GIT = ("git",)
_FILES = ". :!tests/clients/results"
"""The files that count: not those that tests write."""
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
        self._called = set[str]()

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        notes = set(self._notes.read_text().splitlines())
        passed = [item for item in items if item.nodeid in notes and _file_of(item.nodeid) not in notes]
        config.hook.pytest_deselected(items=passed)
        items[:] = [item for item in items if item not in passed]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Notes a test that passed with its fixtures, and the file of fixtures that failed, because it may leak."""
        if report.when == "call" and report.passed:
            self._called.add(report.nodeid)
        if not self._is_writer or report.when != "teardown":
            return
        note = _file_of(report.nodeid) if report.failed else report.nodeid if report.nodeid in self._called else ""
        if note:
            with self._notes.open("a") as file:
                file.write(f"{note}\n")


def _file_of(node_id: str) -> str:
    return node_id.partition("::")[0]


def _version() -> str:
    """Returns a digest of all files of the repository, with the changes that are not committed."""
    digest = hashlib.sha256()
    for command in ("rev-parse HEAD^{tree}", f"diff HEAD --binary -- {_FILES}"):
        digest.update(_git(command))
    for name in _git(f"ls-files --others -z --exclude-standard -- {_FILES}").split(b"\0")[:-1]:
        digest.update(name + b"\0" + (_ROOT / os.fsdecode(name)).read_bytes())
    return digest.hexdigest()[:16]


def _git(command: str) -> bytes:
    return subprocess.run([*_GIT, *command.split()], cwd=_ROOT, capture_output=True, check=True).stdout
