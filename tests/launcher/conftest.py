from collections.abc import Iterator
from pathlib import Path

import pytest

from stagemesh.rpc.credentials import PROCESS
from tests.system.pipelines import pipeline_file

TINY = """\
pipeline: tiny
stages:
  first: {engine: fake, function: source, options: {steps: 2}}
  second: {engine: fake, function: relay}
edges:
  - {from: first, to: second}
outputs: {text: second}
"""


@pytest.fixture(autouse=True)
def _own_credentials() -> Iterator[None]:
    """Restores the credentials of this process, which a launcher sets."""
    before = PROCESS.credentials
    yield
    PROCESS.use(before)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns a pipeline file without models. Sets STAGEMESH_HOME to an empty folder."""
    monkeypatch.setenv("STAGEMESH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("COLUMNS", "200")
    return pipeline_file(tmp_path, TINY, name="tiny")
