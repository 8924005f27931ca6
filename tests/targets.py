"""Which command of the Makefile runs a file of tests: `make test`, or one of the longer commands.

`pytest --target NAME` runs only the files of `make NAME`, and does not even import the others. Without the option,
pytest runs what its other arguments say.
"""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHORT = "test"
"""The target of the files that no other target has."""
TARGETS = {
    # Real engines with models, which are compared with their references.
    "models-check": (
        "tests/diffusion",
        "tests/engines/vllm",
        "tests/models",
        "tests/speech",
        *(
            f"tests/system/test_{name}.py"
            for name in (
                *("forked_stages", "hidden_states", "qwen2_5_omni", "qwen3_omni", "qwen3_tts", "split", "spoken_input"),
                *("sockets", "spoken_turns", "thinker_and_talker", "verifying", "vocoder_checkpoints"),
            )
        ),
    ),
    # The packages as a user installs them, and what needs other languages, other packages or a browser.
    "packages-check": (
        *(
            f"tests/repository/test_{name}.py"
            for name in ("docs_site", "installations", "light_client", "release", "wheel")
        ),
        "tests/conformance/test_other_languages.py",
        "tests/gateway/page",
        "tests/clients/test_clients.py",
        "tests/cpp",
        "tests/go",
        "tests/typescript",
    ),
    # Deployments whose processes are killed, scaled and upgraded, and the chart, with pods as processes in namespaces.
    "deployments-check": (
        "tests/jobs/test_kills.py",
        "tests/k8s",
        "tests/system/test_joint_deaths.py",
        "tests/system/test_rolling.py",
        "tests/system/test_upgrades.py",
    ),
}
"""The files and folders of each longer target."""
_SHORT_IN_LONG = frozenset(
    ("tests/engines/vllm/test_engine.py", "tests/engines/vllm/test_nodes.py", "tests/models/test_fetching.py")
)
"""The files of `make test` in folders of longer targets."""

_target_of_path = {path: target for target, paths in TARGETS.items() for path in paths}


def target_of(path: str) -> str:
    """Returns the target of a file or folder, whose path is relative to the repository."""
    if path in _SHORT_IN_LONG:
        return SHORT
    parents = (path, *map(str, Path(path).parents))
    return next((_target_of_path[each] for each in parents if each in _target_of_path), SHORT)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds the option of the targets that run tests."""
    parser.addoption("--target", choices=(SHORT, *TARGETS), help="run only the files of this target of the Makefile")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out the files of other targets, and the folders that have no file of the target."""
    target = config.getoption("--target")
    if target is None:
        return None
    path = collection_path.relative_to(ROOT).as_posix()
    inside = (each for each in (*_target_of_path, *_SHORT_IN_LONG) if each.startswith(f"{path}/"))
    candidates = (path, *inside) if collection_path.is_dir() else (path,)
    return None if target in map(target_of, candidates) else True
