"""`stagemesh new stage`, and the page that leads through the package that it writes."""

import os
import re
import shlex
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from stagemesh.client import read_wav
from stagemesh.common.errors import ExitCode
from tests.cli.commands import invoke
from tests.repository.commands import ROOT, run

PAGE = ROOT / "docs" / "own-stage.md"
INSTALL = "pip install --no-deps --editable ."


def _environment(site: Path) -> dict[str, str]:
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST")},
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": str(site),
    }


@pytest.mark.timeout(240)  # type checkers run without a cache
def test_the_page_leads_to_a_stage_that_speaks(tmp_path: Path) -> None:
    prose = re.sub(r"```.*?```", "", PAGE.read_text(), flags=re.DOTALL)
    commands = re.findall(r"^    (\S.*)$", prose, re.MULTILINE)
    assert commands[0] == "stagemesh new stage my-voice"
    folder, site = tmp_path, tmp_path / "site"
    environment = _environment(site)
    for command in commands:
        if command.startswith("cd "):
            folder /= command.removeprefix("cd ")
        elif command == INSTALL:
            # Not editable and not into the environment, which other tests use at the same time.
            install = f"python -m pip install --quiet --no-deps --no-build-isolation --target {site} ."
            run(*shlex.split(install), folder=folder, environment=environment)
        else:
            run(*shlex.split(command), folder=folder, environment=environment)
    assert len(read_wav(folder / "hello.wav").samples) == 5 * 60 * 24
    for check in ("mypy src tests", "pyright", "ruff check .", "ruff format --check ."):
        run(*shlex.split(check), folder=folder, environment=environment)


def test_the_examples_of_the_page_run() -> None:
    packets, words = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    check = """
from types import SimpleNamespace
from stagemesh.services.engines.function.base import Call

state = SimpleNamespace(rest=b"")
parts = [Packet({"text": np.frombuffer(part, np.uint8)}) for part in (b"one t", b"wo", b" three")]
assert [_words(None, Call(state, part)) for part in (*parts, None)] == [["one"], [], ["two"], ["three"]]
"""
    code = f"from __future__ import annotations\n{packets}{words}{check}"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_stage_of_the_contributors_guide_runs(tmp_path: Path) -> None:
    guide = (ROOT / "docs/extending.md").read_text().partition("## Add a stage")[2].partition("\n## ")[0]
    function, descriptor = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    (tmp_path / "louder.py").write_text(textwrap.dedent(function))
    (tmp_path / "descriptors.py").write_text(
        textwrap.dedent(descriptor).replace("stagemesh.services.models.louder", "")
    )
    check = """
import numpy as np
from descriptors import LOUDER
from louder import Louder
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call

louder = Louder(None, {})
state = louder.open(seed=1, options={name: option.default for name, option in LOUDER.signature.options.items()})
(made,), rest = louder([Call(state, Packet({"audio": np.ones(3, np.float32)})), Call(state, None)])
LOUDER.signature.emits["audio"].spec.check("audio", made.tensors["audio"])
assert (made.tensors["audio"].tolist(), rest) == ([1, 1, 1], [])
"""
    run(sys.executable, "-c", check, folder=tmp_path, environment=_environment(tmp_path))


WRONG_NAMES = ("My-voice", "1voice", "my_voice", "json", "class", "stagemesh", "a--b")
REFUSED = [
    *((name, "new", ExitCode.USAGE, f"{name!r} cannot be the name of a package") for name in WRONG_NAMES),
    ("voice", "folder", ExitCode.REFUSED, "choose another folder with --folder DIR"),
    ("voice", "file/new", ExitCode.USAGE, "cannot be written: "),
]


@pytest.mark.parametrize(("name", "folder", "code", "said"), REFUSED)
def test_a_refused_project_leaves_nothing(tmp_path: Path, name: str, folder: str, code: ExitCode, said: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    ran = invoke("new", "stage", name, "--folder", str(tmp_path / folder))
    assert (ran.exit_code, sorted(path.name for path in tmp_path.rglob("*"))) == (code, ["file", "folder"])
    assert said in ran.stderr
