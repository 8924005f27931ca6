"""The pipeline that most tests of the orchestrator use."""

from pathlib import Path

import pytest

from stagemesh.pipeline import Pipeline
from tests.orchestrator.mesh import load


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    """The pipeline `CHAIN`: three stages in a row."""
    return load(tmp_path)
