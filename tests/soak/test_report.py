from dataclasses import replace

from tests.soak.delivery import Flaws
from tests.soak.report import Report

CLEAN = Report(
    requests=10,
    failed={},
    flawed={},
    timelines={},
    faults={"kill": 3},
    missed_faults=[],
    pause_s={"kill": [0.3, 0.9, 4.0], "nothing": [0.1, 0.2, 0.3]},
    growth=[],
    orchestrator_mb=[40, 41],
    left=[],
    slowest_s=2.0,
)


def test_a_soak_without_problems_passes() -> None:
    assert CLEAN.problems() == []


def test_each_kind_of_problem_fails_a_soak() -> None:
    assert replace(CLEAN, failed={"r1": "it broke"}).problems() == ["request r1 failed: it broke"]
    assert len(replace(CLEAN, flawed={"r1": Flaws(lost=1)}).problems()) == 1
    assert len(replace(CLEAN, missed_faults=["kill of a-0"]).problems()) == 1
    assert replace(CLEAN, growth=["a-0 grew"]).problems() == ["a-0 grew"]
    assert replace(CLEAN, left=["a-0: 1 running"]).problems() == ["left behind: a-0: 1 running"]


def test_long_pauses_after_kills_fail_a_soak() -> None:
    late = replace(CLEAN, pause_s={"kill": [1.5, 1.3, 1.4], "nothing": [0.2]})
    assert late.problems() == ["the median pause after a kill is 1.40 s, and 0.20 s without a fault"]


def test_pauses_of_a_busy_machine_are_allowed() -> None:
    assert replace(CLEAN, pause_s={"kill": [1.4], "nothing": [0.8]}).problems() == []


def test_the_summary_has_the_figures_and_the_problems() -> None:
    summary = replace(CLEAN, flawed={"r1": Flaws(lost=2), "r2": Flaws(lost=1, duplicated=4)}).summary()
    assert "3 faults (3 kill), 0 missed" in summary
    assert "4 duplicated, 3 lost, 0 reordered, 0 altered" in summary
    assert "to resume after kill: median 0.90 s" in summary
    assert "! request r1" in summary
