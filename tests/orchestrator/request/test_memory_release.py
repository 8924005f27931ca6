"""The outputs of a request are freed with it, before the garbage collector runs: they can be hundreds of MB."""

import asyncio
import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stagemesh.common.errors import InternalError
from stagemesh.orchestrator.request.lifecycle import RequestRegistry
from stagemesh.orchestrator.request.output_record import RequestRecord
from stagemesh.v1 import stage_pb2
from tests.orchestrator.mesh import mesh
from tests.orchestrator.scripted_stage import ACCEPTED, Response, ScriptedStage


@pytest.mark.usefixtures("no_collector")
async def test_a_request_that_is_no_longer_kept_is_freed_at_once(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        await chain.generate(request_id="r1")
        await chain.until_idle()
        assert _found(RequestRecord) == 1
        _forget_ended()
        await asyncio.sleep(0)
        assert _found(RequestRecord) == 0


async def test_the_timeline_of_a_failed_request_refers_to_none_of_its_outputs(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"c": _fail}) as chain:
        for number in range(4):
            await chain.failure(request_id=f"r{number}")
        await chain.until_idle()
        assert _found(RequestRecord) == 4
        _forget_ended()
        gc.collect()
        assert _found(RequestRecord) == 0


async def _fail(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    del stage, request
    yield ACCEPTED
    raise InternalError("out of luck")


def _found(kind: type[object]) -> int:
    return sum(type(each) is kind for each in gc.get_objects())


def _forget_ended() -> None:
    """Drops the requests that have ended, as their timers would."""
    for each in gc.get_objects():
        if type(each) is RequestRegistry:
            each.clear()
