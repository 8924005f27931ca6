from pathlib import Path

import pytest

from stagemesh.connectors.errors import OverloadedError
from stagemesh.orchestrator.admission import Admission
from tests.orchestrator.mesh import CHAIN, ask, mesh
from tests.orchestrator.scripted_stage import hang


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


async def test_a_request_beyond_the_limit_is_told_when_to_come_back(tmp_path: Path) -> None:
    limited = CHAIN + "limits: {max_in_flight: 1}\n"
    async with mesh(tmp_path, limited, scripts={"a": hang}) as chain:
        call = chain.stub.Generate(ask())
        await chain.stages["a"].started.wait()
        error = await chain.failure()
        assert len(chain.stages["a"].requests) == 1
        call.cancel()
    assert isinstance(error, OverloadedError)
    assert error.reason == "ADMISSION_LIMIT"
    assert error.retry_after_s is not None
    assert error.retry_after_s >= 0.1


async def test_a_finished_request_leaves_its_place_to_the_next(tmp_path: Path) -> None:
    async with mesh(tmp_path, CHAIN + "limits: {max_in_flight: 1}\n") as chain:
        for _ in range(5):
            await chain.generate()


async def test_a_request_that_cannot_be_planned_holds_nothing(tmp_path: Path) -> None:
    async with mesh(tmp_path, ready=False) as chain:
        await chain.servers["b"].stop(grace_s=0)
        await chain.failure()
        described = await chain.describe()
    assert described.in_flight == 0
    assert [replica.running for stage in described.stages for replica in stage.replicas] == [0, 0, 0]


def test_the_pause_is_what_requests_take_shared_among_those_that_run() -> None:
    clock = _Clock()
    admission = Admission(2, clock=clock)
    for _ in range(60):
        give_back = admission.admit()
        clock.now_s += 8.0
        give_back()
    admission.admit()
    admission.admit()
    with pytest.raises(OverloadedError) as caught:
        admission.admit()
    assert caught.value.retry_after_s == pytest.approx(4.0, rel=0.01)
