"""Pipelines of three stages in a row, which most tests of the orchestrator use."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from stagemesh.pipeline import Pipeline
from tests.orchestrator.mesh import Mesh, load, mesh
from tests.orchestrator.replicas import Clock
from tests.orchestrator.scripted_stage import hang


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    """The pipeline `CHAIN`."""
    return load(tmp_path)


@pytest.fixture
async def chain(tmp_path: Path) -> AsyncGenerator[Mesh]:
    """An orchestrator that serves the pipeline `CHAIN`."""
    async with mesh(tmp_path) as chain:
        yield chain


@pytest.fixture
async def busy(tmp_path: Path) -> AsyncGenerator[Mesh]:
    """An orchestrator that serves the pipeline `CHAIN` over stages whose steps never end by themselves."""
    async with mesh(tmp_path, scripts=dict.fromkeys("abc", hang)) as busy:
        yield busy


@pytest.fixture
def clock() -> Clock:
    """Time that the test sets."""
    return Clock()
