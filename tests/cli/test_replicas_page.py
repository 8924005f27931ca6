"""docs/replicas.md: its commands run a deployment by hand, and upgrade it."""

import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stagemesh.cli.launcher.ports import PortPicker
from tests.cli.commands import COMMAND

PAGE = Path(__file__).parents[2] / "docs" / "replicas.md"


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    for file in tmp_path.glob("*.pid"):
        with suppress(ProcessLookupError):
            os.kill(int(file.read_text()), signal.SIGKILL)


def _script() -> str:
    """Returns all commands of the page, with free ports."""
    script = "\n".join(re.findall(r"```bash\n(.*?)```", PAGE.read_text(), re.DOTALL))
    picker = PortPicker()
    ports = {port: str(picker.pick()) for port in sorted(set(re.findall(r"127\.0\.0\.1:(\d+)", script)))}
    return re.sub(r"127\.0\.0\.1:(\d+)", lambda found: f"127.0.0.1:{ports[found[1]]}", script)


def test_the_page_deploys_and_upgrades_a_pipeline(folder: Path) -> None:
    command = folder / "bin" / "stagemesh"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {shlex.join(COMMAND)} "$@"\n')
    command.chmod(0o755)
    environment = {**os.environ, "PATH": f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"}
    # set -e alone would ignore a failed command in a pipe.
    ran = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", _script()],
        cwd=folder,
        env=environment,
        check=False,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
    )
    assert ran.returncode == 0, ran.stdout
    generations = re.findall(r"is valid \(.*\), generation (\w+)", ran.stdout)
    assert len(set(generations)) == 2
    listed = [line for line in ran.stdout.splitlines() if re.match(r"\s*(writer|reader)\s", line)]
    assert [re.findall(r"\b(\w{12})\b", line)[-1] for line in listed] == [generations[0]] * 2 + [generations[1]] * 2
    assert [text.count("Step ") for text in re.findall(r"Step 0 is .*", ran.stdout)] == [20, 20, 30]
