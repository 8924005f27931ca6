"""Sessions of a pipeline with one stage."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest

from tests.orchestrator.mesh import Mesh, mesh
from tests.orchestrator.scripted_stage import hang
from tests.orchestrator.session.fake_runner import Chat, chatting
from tests.orchestrator.session.scripts import ECHO, Steered


@pytest.fixture
async def chat(tmp_path: Path) -> AsyncGenerator[Chat]:
    """A session without stages and without gRPC."""
    async with chatting(tmp_path, ECHO) as chat:
        yield chat


@pytest.fixture
async def echo(tmp_path: Path) -> AsyncGenerator[Mesh]:
    """An orchestrator whose stage says hello."""
    async with mesh(tmp_path, ECHO) as echo:
        yield echo


@pytest.fixture
async def hanging(tmp_path: Path) -> AsyncGenerator[Mesh]:
    """An orchestrator whose stage never ends its steps."""
    async with mesh(tmp_path, ECHO, scripts={"a": hang}) as hanging:
        yield hanging


@pytest.fixture
def script() -> Steered:
    """The script of the stage of `steered`."""
    return Steered()


@pytest.fixture
async def steered(tmp_path: Path, script: Steered) -> AsyncGenerator[Mesh]:
    """An orchestrator whose stage emits what the test says. A request that runs has time to end when it stops."""
    async with mesh(tmp_path, ECHO, scripts={"a": script}, drain_s=10) as steered:
        yield steered
