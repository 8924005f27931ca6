"""The system time is set while requests run."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from stagemesh.v1 import stage_pb2
from tests.orchestrator.mesh import ask, mesh, texts
from tests.orchestrator.scripted_stage import ACCEPTED, Response, ScriptedStage, say_hello

_TEN_YEARS_S = 10 * 365 * 86_400.0


@pytest.mark.parametrize("jump_s", [_TEN_YEARS_S, -_TEN_YEARS_S])
async def test_a_running_request_does_not_notice_a_clock_that_jumps(
    tmp_path: Path, jump_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_back, real = asyncio.Event(), time.time

    async def patient(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        yield ACCEPTED
        await set_back.wait()
        async for response in say_hello(stage, request):
            yield response

    async with mesh(tmp_path, scripts=dict.fromkeys("abc", patient)) as chain:
        call = chain.stub.Generate(ask(request_id="r"), timeout=20)
        await asyncio.gather(*(stage.started.wait() for stage in chain.stages.values()))
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        set_back.set()
        events = [event async for event in call]
        assert texts(events, "last") == "c done"
        assert 0.0 <= events[-1].finished.timings.finished_s < 20.0
        await chain.until_idle()
