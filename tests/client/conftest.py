import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias

import pytest

from stagemesh.client import AsyncClient, Client, Event, RetryPolicy
from tests.client.scripted import ScriptedOrchestrator, served
from tests.client.session_drivers import QUICK, Converse, asynchronous, synchronous
from tests.typescript.nodes import require_programs
from tests.typescript.sessions import typescript

Generate: TypeAlias = Callable[..., Awaitable[list[Event]]]
"""Sends a prompt to endpoints with a `policy` and arguments of `AsyncClient.generate`. Returns the events."""


@pytest.fixture
async def orchestrator() -> AsyncIterator[ScriptedOrchestrator]:
    async with served() as service:
        yield service


@pytest.fixture
async def other() -> AsyncIterator[ScriptedOrchestrator]:
    """A second orchestrator of the same pipeline."""
    async with served() as service:
        yield service


@pytest.fixture(params=[asynchronous, synchronous, typescript], ids=lambda opens: opens.__name__)
def converse(request: pytest.FixtureRequest) -> Converse:
    """Opens sessions. A test with this fixture runs with each client."""
    if request.param is typescript:
        require_programs()
    opens: Converse = request.param
    return opens


@pytest.fixture(params=["asynchronous", "synchronous"])
def generate(request: pytest.FixtureRequest) -> Generate:
    """Sends a prompt. A test with this fixture runs with each client in Python."""

    async def by_async_client(*endpoints: str, policy: RetryPolicy = QUICK, **arguments: Any) -> list[Event]:
        async with AsyncClient(*endpoints, retry_policy=policy) as client:
            return [event async for event in client.generate("hello", **arguments)]

    async def by_client(*endpoints: str, policy: RetryPolicy = QUICK, **arguments: Any) -> list[Event]:
        def run() -> list[Event]:
            with Client(*endpoints, retry_policy=policy) as client:
                return list(client.generate("hello", **arguments))

        return await asyncio.to_thread(run)

    return by_client if request.param == "synchronous" else by_async_client
