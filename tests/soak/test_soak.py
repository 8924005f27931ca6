"""A pipeline of three stages with three replicas each, under load, while its processes are killed and partitioned.

The long tests inject 200 faults, of which up to three hit at the same time. All can be run by hand with any seed:
`python -m tests.soak --help`.
"""

from pathlib import Path

import pytest

from tests.soak.faults import FaultKind
from tests.soak.report import Report
from tests.soak.soak import Plan, soak


def _passes(report: Report) -> None:
    print(report.summary())
    assert report.problems() == []


@pytest.mark.timeout(180)
async def test_no_client_notices_one_fault_of_each_kind(tmp_path: Path) -> None:
    kinds = tuple(FaultKind)
    report = await soak(tmp_path, Plan(kinds=kinds, faults=len(kinds), faults_s=60, seed=1, replicas=2, different=6))
    _passes(report)
    assert set(report.faults) == {kind.value for kind in kinds}


@pytest.mark.soak
@pytest.mark.timeout(300)
async def test_no_client_notices_a_minute_of_faults(tmp_path: Path) -> None:
    report = await soak(tmp_path, Plan(kinds=tuple(FaultKind), faults_s=60, seed=1))
    _passes(report)
    assert sum(report.faults.values()) >= 10
    assert set(report.faults) == {kind.value for kind in FaultKind}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", [2, 3, 4])
async def test_no_client_notices_two_hundred_faults_of_which_up_to_three_hit_at_once(tmp_path: Path, seed: int) -> None:
    report = await soak(tmp_path, Plan(kinds=tuple(FaultKind), faults=200, faults_s=3000, seed=seed, most_at_once=3))
    _passes(report)
    assert sum(report.faults.values()) >= 200
    assert report.blows.keys() == {1, 2, 3}
