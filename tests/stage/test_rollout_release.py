"""The verdicts of orchestrators whether a rolling update may count a replica as ready."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from typing import TypeAlias

import pytest

from benchmarks.simulation import virtual_time
from stagemesh.services.stage.health import RolloutRelease
from stagemesh.v1 import stage_pb2
from tests.stage.replicas import served_stage

Verdict: TypeAlias = "stage_pb2.RolloutVerdict.ValueType"
NONE = stage_pb2.ROLLOUT_VERDICT_UNSPECIFIED
RELEASED, WITHHELD = stage_pb2.ROLLOUT_VERDICT_RELEASED, stage_pb2.ROLLOUT_VERDICT_WITHHELD


def _play(scene: Callable[[RolloutRelease], Awaitable[None]]) -> None:
    async def play() -> None:
        release = RolloutRelease()
        release.set_available(True)
        await scene(release)

    virtual_time.run(play())


@pytest.mark.parametrize(
    ("verdicts", "ready"),
    [
        ([], False),
        ([NONE], False),
        ([RELEASED], True),
        ([WITHHELD], False),
        ([RELEASED, WITHHELD], False),
        ([RELEASED, NONE, RELEASED], True),
    ],
)
def test_one_orchestrator_must_release_a_replica_and_none_withhold_it(verdicts: list[Verdict], ready: bool) -> None:
    async def scene(release: RolloutRelease) -> None:
        with ExitStack() as stack:
            for verdict in verdicts:
                stack.enter_context(release.verdict(verdict))
            assert release.is_ready is ready
        assert not release.is_ready

    _play(scene)


def test_a_replica_that_was_ready_for_a_while_stays_released() -> None:
    async def scene(release: RolloutRelease) -> None:
        with release.verdict(RELEASED):
            await asyncio.sleep(10.1)
        assert release.is_ready
        with release.verdict(WITHHELD):
            assert release.is_ready
        release.set_available(False)
        assert not release.is_ready
        release.set_available(True)
        assert release.is_ready

    _play(scene)


def test_an_interruption_restarts_the_time_until_a_replica_stays_released() -> None:
    async def scene(release: RolloutRelease) -> None:
        for _ in range(2):
            with release.verdict(RELEASED):
                await asyncio.sleep(9)
            assert not release.is_ready

    _play(scene)


async def test_the_verdict_of_a_load_watch_ends_with_its_call() -> None:
    async with served_stage() as replica:
        rollout = replica.runtime.lifecycle.rollout
        changed = asyncio.Event()
        rollout.on_change = changed.set
        rollout.set_available(True)
        withholding = replica.stub.WatchLoad(stage_pb2.WatchLoadRequest(verdict=WITHHELD))
        await withholding.read()
        releasing = replica.stub.WatchLoad(stage_pb2.WatchLoadRequest(verdict=RELEASED))
        await releasing.read()
        assert not rollout.is_ready
        changed.clear()
        withholding.cancel()
        async with asyncio.timeout(10):
            await changed.wait()
        assert rollout.is_ready
        assert rollout.is_watched
        releasing.cancel()
