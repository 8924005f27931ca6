"""A process whose engine fails is of no use to anybody."""

import asyncio

import pytest

from stagemesh.connectors.errors import NotReadyError, UnavailableError
from stagemesh.services.serving.server import Server
from stagemesh.services.stage.process import work
from tests.stage.gated_engine import GatedEngine
from tests.stage.replicas import make_runtime


async def test_dead_engine_ends_the_service() -> None:
    engine = GatedEngine()
    engine.death.set()
    runtime = make_runtime(engine=engine)
    with pytest.raises(UnavailableError, match="stage thinker: the gate fell down") as caught:
        await work(runtime, Server("127.0.0.1:0"), asyncio.Event())
    assert caught.value.reason == "ENGINE_DIED"
    await runtime.close()


async def test_engine_that_does_not_load_ends_the_service() -> None:
    engine = GatedEngine()
    engine.load_error = ValueError("no such weights")
    runtime = make_runtime(engine=engine)
    with pytest.raises(NotReadyError, match="no such weights") as caught:
        await work(runtime, Server("127.0.0.1:0"), asyncio.Event())
    assert caught.value.reason == "LOAD_FAILED"
    await runtime.close()


async def test_stop_while_loading_ends_it_in_order() -> None:
    stopping = asyncio.Event()
    stopping.set()
    engine = GatedEngine()
    runtime = make_runtime(engine=engine)
    await work(runtime, Server("127.0.0.1:0"), stopping)
    await runtime.close()
    assert engine.closed
