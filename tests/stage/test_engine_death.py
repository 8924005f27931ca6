"""A process whose engine fails ends."""

import asyncio
from collections.abc import Callable

import pytest

from stagemesh.common.errors import NotReadyError, UnavailableError
from stagemesh.rpc.server import Server
from stagemesh.services.stage.process import work
from tests.stage.gated_engine import GatedEngine
from tests.stage.replicas import make_runtime


async def test_a_dead_engine_ends_the_service() -> None:
    engine = GatedEngine()
    engine.death.set()
    runtime = make_runtime(engine=engine)
    with pytest.raises(UnavailableError, match="stage thinker: the gate fell down") as caught:
        await work(runtime, Server("127.0.0.1:0"), asyncio.Event())
    assert caught.value.reason == "ENGINE_DIED"
    await runtime.close()


async def test_an_engine_that_fails_to_load_ends_the_service() -> None:
    engine = GatedEngine()
    engine.load_error = ValueError("no such weights")
    runtime = make_runtime(engine=engine)
    with pytest.raises(NotReadyError, match="no such weights") as caught:
        await work(runtime, Server("127.0.0.1:0"), asyncio.Event())
    assert caught.value.reason == "LOAD_FAILED"
    await runtime.close()


async def test_a_replica_drained_during_its_start_is_never_serving() -> None:
    class DrainedEngine(GatedEngine):
        """An engine during whose loading an operator drains the replica."""

        async def start(self, report: Callable[[str], None]) -> None:
            await super().start(report)
            asyncio.get_running_loop().call_soon(runtime.lifecycle.start_drain)

    class SeenServer(Server):
        def set_health(self, service: str, *, serving: bool) -> None:
            seen[service] = serving

    seen, served = dict[str, bool](), list[bool]()
    engine = DrainedEngine()
    engine.death.set()
    runtime = make_runtime(engine=engine)
    runtime.lifecycle.on_serving = served.append
    with pytest.raises(UnavailableError):
        await work(runtime, SeenServer("127.0.0.1:0"), asyncio.Event())
    await runtime.close()
    assert seen == {"stagemesh.v1.StageControlService": True}
    assert set(served) == {False}


async def test_a_stop_during_loading_closes_the_engine() -> None:
    stopping = asyncio.Event()
    stopping.set()
    engine = GatedEngine()
    runtime = make_runtime(engine=engine)
    await work(runtime, Server("127.0.0.1:0"), stopping)
    await runtime.close()
    assert engine.closed
