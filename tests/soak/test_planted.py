"""The soak finds planted problems on real processes, and none if none is planted."""

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from enum import Enum
from functools import partial
from pathlib import Path

import pytest

from stagemesh.client import Event, Text
from stagemesh.common.errors import InternalError
from tests.deployment import Deployment, deployed_for_module
from tests.soak import soak as soaking
from tests.soak.delivery import Delivery, Flaws
from tests.soak.report import Report
from tests.soak.soak import Plan, fake_work, soak, soak_deployment
from tests.soak.workload import Request, write_pipeline

PIECE = 3
"""The number of the piece that is changed. A piece is the content of one event."""


class Tampering(Enum):
    """The way in which one piece of one output of every request is changed."""

    NOTHING = "nothing"
    DUPLICATE = "duplicate"
    LOSE = "lose"
    SWAP = "swap"
    ALTER = "alter"
    END_EARLY = "end early"
    FAIL = "fail"


class TamperedDelivery(Delivery):
    """The delivery of a request one of whose outputs is changed."""

    def __init__(
        self, request: Request, units: Mapping[str, Sequence[bytes]], *, tampering: Tampering, output: str
    ) -> None:
        super().__init__(request, units)
        self._tampering, self._output = tampering, output
        self._seen, self._has_ended = 0, False
        self._held: list[Event] = []

    def add(self, event: Event) -> None:
        is_piece = getattr(event, "output", "") == self._output
        self._seen += is_piece
        changed = self._tampered(event) if is_piece and self._seen == PIECE else [event]
        if is_piece and self._seen > PIECE and self._held:
            changed.append(self._held.pop())
        for each in changed if not self._has_ended else ():
            super().add(each)

    def _tampered(self, event: Event) -> list[Event]:
        """Returns the events instead of one. Raises InternalError if the request must fail."""
        match self._tampering:
            case Tampering.DUPLICATE:
                return [event, event]
            case Tampering.LOSE:
                return []
            case Tampering.SWAP:
                self._held.append(event)
                return []
            case Tampering.ALTER:
                assert isinstance(event, Text)
                return [replace(event, delta=event.delta[:-1].swapcase() + event.delta[-1:])]
            case Tampering.END_EARLY:
                self._has_ended = True
                return []
            case Tampering.FAIL:
                raise InternalError("it was made to fail")
            case _:
                return [event]


PLAN = Plan(replicas=1, clients=4, different=4, steps=(8, 12), step_s=0.02)


up = deployed_for_module(lambda folder: write_pipeline(folder, replicas=1, step_s=PLAN.step_s))


async def _tampered(up: Deployment, tampering: Tampering, *, output: str = "text") -> Report:
    delivery = partial(TamperedDelivery, tampering=tampering, output=output)
    return await soak_deployment(up, PLAN, work=replace(fake_work(PLAN), delivery=delivery))


async def test_no_problem_is_found_if_none_is_planted(up: Deployment) -> None:
    report = await _tampered(up, Tampering.NOTHING)
    assert report.problems() == []
    assert (report.requests, report.faults) == (4, {})


@pytest.mark.parametrize(
    ("tampering", "output", "found"),
    [
        (Tampering.DUPLICATE, "text", Flaws(duplicated=4)),
        (Tampering.DUPLICATE, "frames", Flaws(duplicated=4)),
        (Tampering.LOSE, "text", Flaws(lost=4)),
        (Tampering.LOSE, "frames", Flaws(lost=4)),
        (Tampering.SWAP, "text", Flaws(reordered=4)),
        (Tampering.SWAP, "frames", Flaws(reordered=4)),
        (Tampering.ALTER, "text", Flaws(lost=4, altered=4)),
    ],
)
async def test_a_tampered_delivery_is_found(up: Deployment, tampering: Tampering, output: str, found: Flaws) -> None:
    report = await _tampered(up, tampering, output=output)
    assert report.flaws == found
    assert len(report.flawed) == report.requests == 4


@pytest.mark.parametrize("tampering", [Tampering.DUPLICATE, Tampering.LOSE, Tampering.SWAP])
async def test_audio_cut_anywhere_is_compared_too(up: Deployment, tampering: Tampering) -> None:
    assert len((await _tampered(up, tampering, output="audio")).flawed) == 4


async def test_a_request_that_ends_early_has_failed_and_lost_units(up: Deployment) -> None:
    report = await _tampered(up, Tampering.END_EARLY)
    assert len(report.failed) == len(report.timelines) == 4
    assert report.flaws.lost > 4


async def test_a_request_that_fails_is_counted_with_its_error(up: Deployment) -> None:
    report = await _tampered(up, Tampering.FAIL)
    assert len(report.timelines) == 4
    assert all("it was made to fail" in error for error in report.failed.values())
    assert not report.flaws


async def test_a_replica_that_releases_nothing_is_found(up: Deployment, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soaking, "_QUIET_S", 1.0)
    with up.client() as client:
        events = iter(client.generate("hello", seed=1, max_tokens=2000))
        next(events)
        report = await soak_deployment(up, PLAN)
        assert len([left for left in report.left if "1 running" in left]) == 3
        assert any("of the orchestrator" in left for left in report.left)
        events.close()


async def test_remaining_shared_memory_is_found(
    up: Deployment, tmp_path: Path, left: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(soaking, "deployed", lambda _: nullcontext(up))
    asyncio.get_running_loop().call_later(0.1, left.touch)
    assert (await soak(tmp_path, PLAN)).problems() == [f"left behind: {left}"]


@pytest.fixture
def left() -> Iterator[Path]:
    left = Path("/dev/shm/stagemesh-soak-left")
    yield left
    left.unlink(missing_ok=True)
