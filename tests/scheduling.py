"""Which files of tests run in one process, and in which order processes take them: the longest first.

Files that use one deployment (tests/shared.py) form a group, which one process runs from beginning to end. Each other
file is its own group. `make test-durations` writes tests/durations.json, from which the order follows: otherwise one
process could still run a long file when all others have ended.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

GROUPS = {
    "omni": ("tests/system/test_qwen3_omni.py", "tests/system/test_spoken_turns.py"),
    "jobs": ("tests/jobs/test_commands.py", "tests/jobs/test_databases.py", "tests/jobs/test_job_server.py"),
    # They share the wheel and its environments.
    "packaging": tuple(
        f"tests/repository/test_{name}.py" for name in ("images", "installations", "light_client", "release", "wheel")
    ),
    "relays": (
        *("tests/cli/test_doctor.py", "tests/cli/test_trace.py"),
        *("tests/go/test_client.py", "tests/typescript/test_client.py"),
    ),
    "split": ("tests/system/test_split.py", "tests/system/test_forked_stages.py"),
    "vllm-text": ("tests/engines/vllm/test_engine.py", "tests/engines/vllm/test_resume.py"),
    "speech": ("tests/speech/test_speech.py", "tests/system/test_spoken_input.py"),
}
"""The files of each group that is more than one file."""

DURATIONS = Path(__file__).with_name("durations.json")
_ASSUMED_S = 5.0
"""The duration of a file that tests/durations.json does not name."""
_NAMED_FROM_S = 0.5

_group_of_file = {file: group for group, files in GROUPS.items() for file in files}


def group_of(node_id: str) -> str:
    """Returns the group of the test with this id."""
    file = node_id.partition("::")[0]
    return _group_of_file.get(file, file)


class GroupScheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives all tests of a group to one process."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling:
    """Called by pytest-xdist in the process that distributes the tests."""
    config.option.loadscopereorder = False
    return GroupScheduling(config, log)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of `make test-durations`."""
    parser.addoption("--write-durations", action="store_true", help="write tests/durations.json")


def pytest_configure(config: pytest.Config) -> None:
    """Measures durations in the process that reports all tests."""
    if config.getoption("--write-durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Durations())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the groups by their durations if several processes run them."""
    if hasattr(config, "workerinput"):
        durations_s: dict[str, float] = json.loads(DURATIONS.read_text())
        groups_s = defaultdict[str, float](float)
        for file in {item.nodeid.partition("::")[0] for item in items}:
            groups_s[group_of(file)] += durations_s.get(file, _ASSUMED_S)
        items.sort(key=lambda item: (-groups_s[group_of(item.nodeid)], group_of(item.nodeid)))


class _Durations:
    def __init__(self) -> None:
        self._files_s = defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._files_s[report.nodeid.partition("::")[0]] += report.duration

    def pytest_sessionfinish(self) -> None:
        """Writes the durations of the files that ran, and keeps those of the others."""
        known_s = json.loads(DURATIONS.read_text()) | {file: round(s, 1) for file, s in self._files_s.items()}
        named_s = {file: s for file, s in sorted(known_s.items()) if s >= _NAMED_FROM_S and Path(file).exists()}
        DURATIONS.write_text(json.dumps(named_s, indent=1) + "\n")
