from collections.abc import AsyncIterator

import pytest

from tests.client.scripted import ScriptedOrchestrator, served


@pytest.fixture
async def orchestrator() -> AsyncIterator[ScriptedOrchestrator]:
    async with served() as service:
        yield service


@pytest.fixture
async def other() -> AsyncIterator[ScriptedOrchestrator]:
    """A second orchestrator of the same pipeline."""
    async with served() as service:
        yield service
