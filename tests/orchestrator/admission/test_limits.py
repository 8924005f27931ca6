"""What is counted, and who is sent away when it is too much."""

import gc
import weakref
from collections import Counter
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.common.errors import DeadlineError, OverloadedError, UnavailableError
from stagemesh.orchestrator.admission import CallerLoad
from stagemesh.orchestrator.spec import Bounds
from tests.orchestrator.admission.doors import Asked, Door


def test_beyond_pipeline_and_queue_one_is_refused() -> None:
    door = Door(1, max_queued=1)
    door.ask()
    door.ask()
    with pytest.raises(OverloadedError, match="1 requests run and 1 wait") as caught:
        door.ask()
    assert caught.value.reason == "ADMISSION_LIMIT"


def test_bytes_are_limited_as_requests_are() -> None:
    door = Door(10, max_in_flight_bytes=100)
    first, second, third = (door.ask(input_bytes=50) for _ in range(3))
    assert (first.runs, second.runs, third.waits) == (True, True, True)


def test_one_that_is_larger_than_the_limit_runs_alone() -> None:
    door = Door(10, max_in_flight_bytes=100)
    large, small = door.ask(input_bytes=500), door.ask(input_bytes=1)
    assert (large.runs, small.waits) == (True, True)


def test_as_much_is_reserved_as_requests_of_the_kind_made() -> None:
    door = Door(10, max_in_flight_bytes=100)
    door.has_run(took_s=1.0, kind="picture", made_bytes=60)
    door.has_run(took_s=1.0, kind="text", made_bytes=1, times=100)
    asked = [door.ask(kind=kind) for kind in ("picture", "text", "picture")]
    assert [each.runs for each in asked] == [True, True, False]
    assert door.admission.snapshot().in_flight_bytes == 61


def test_the_queue_holds_so_many_bytes() -> None:
    door = Door(1, max_queued_bytes=100)
    door.ask()
    door.ask(input_bytes=60)
    with pytest.raises(OverloadedError):
        door.ask(input_bytes=60)


def test_a_caller_has_limits_of_its_own() -> None:
    door = Door(10, per_caller=Bounds(max_in_flight=1, max_queued=1))
    asked = [door.ask(caller="a"), door.ask(caller="a"), door.ask(caller="b")]
    assert [each.runs for each in asked] == [True, False, True]
    with pytest.raises(OverloadedError, match="caller 'a'") as caught:
        door.ask(caller="a")
    assert caught.value.reason == "CALLER_LIMIT"


def test_one_caller_cannot_keep_the_queue_from_others() -> None:
    door = Door(1, max_queued=10)
    greedy = [door.ask(caller="greedy") for _ in range(11)]
    others = [door.ask(caller="b") for _ in range(5)]
    assert all(asked.waits for asked in others)
    assert Counter(asked.heard[-1] for asked in greedy) == {"admitted": 1, "queued": 5, "refused": 5}
    with pytest.raises(OverloadedError):
        door.ask(caller="b")
    with pytest.raises(OverloadedError):
        door.ask(caller="greedy")


def test_who_is_pushed_out_is_told_when_to_come_back() -> None:
    door = Door(1, max_queued=2)
    door.ask(caller="greedy")
    _, last = door.ask(caller="greedy"), door.ask(caller="greedy")
    door.ask(caller="b")
    assert isinstance(last.error, OverloadedError)
    assert last.error.retry_after_s is not None


def test_nobody_is_pushed_out_for_one_who_finds_no_room_even_so() -> None:
    door = Door(1, max_queued_bytes=100)
    first = door.ask(caller="greedy")
    waiting = [door.ask(caller="greedy", input_bytes=20) for _ in range(5)]
    with pytest.raises(OverloadedError):
        door.ask(caller="b", input_bytes=70)
    assert all(asked.waits for asked in waiting)
    assert door.serve(waiting, first=first) == [asked.name for asked in waiting]


def test_a_higher_priority_finds_a_full_queue_open() -> None:
    door = Door(1, max_queued=2)
    door.ask()
    first, second = door.ask(), door.ask()
    high = door.ask(priority=1)
    assert (first.waits, second.error is not None, high.waits) == (True, True, True)
    with pytest.raises(OverloadedError):
        door.ask(priority=-1)


def test_the_figures_are_those_of_each_caller() -> None:
    door = Door(1)
    door.ask(caller="a", input_bytes=5)
    door.ask(caller="b", input_bytes=7)
    figures = door.admission.snapshot()
    assert (figures.in_flight, figures.in_flight_bytes, figures.queued, figures.queued_bytes) == (1, 5, 1, 7)
    assert figures.callers == (
        CallerLoad("a", in_flight=1, in_flight_bytes=5, queued=0, queued_bytes=0),
        CallerLoad("b", in_flight=0, in_flight_bytes=0, queued=1, queued_bytes=7),
    )


def test_nothing_is_left_of_those_who_have_gone() -> None:
    door = Door(1)
    running, waiting = door.ask(caller="a"), door.ask(caller="b")
    assert waiting.ticket is not None
    door.admission.withdraw(waiting.ticket)
    door.end(running)
    assert door.admission.snapshot().callers == ()


@pytest.mark.parametrize("urgent_first", [True, False])
def test_those_who_have_left_the_queue_are_let_go(urgent_first: bool) -> None:
    door = Door(1, max_queued=1000)
    door.ask(caller="first")
    here = [door.ask(caller="b", within_s=50.0)] if urgent_first else []
    waiting = [door.ask(within_s=99.0) for _ in range(500)]
    door.admission.tick()
    door.admission.tick()
    gone = [weakref.ref(asked.ticket) for asked in waiting if asked.ticket is not None]
    while waiting:
        ticket = waiting.pop().ticket
        assert ticket is not None
        door.admission.withdraw(ticket)
    ticket = None
    for _ in range(3 if here else 1):
        door.admission.tick()
    gc.collect()
    assert sum(ticket() is not None for ticket in gone) <= 50
    assert all(asked.waits for asked in here)


def test_closing_refuses_all_who_wait_and_none_who_run() -> None:
    door = Door(1)
    running, waiting = door.ask(), [door.ask(caller=caller) for caller in "ab"]
    door.admission.close(UnavailableError("it stops"))
    assert (running.runs, [str(asked.error) for asked in waiting]) == (True, ["it stops"] * 2)
    assert door.admission.queued == 0


_ASKS = st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.sampled_from([1.0, 9.0, 99.0]), st.integers(0, 40))


@settings(deadline=None)
@given(st.lists(st.one_of(_ASKS, st.sampled_from(["end", "leave", "tick"])), max_size=120))
def test_limits_hold_whatever_comes_and_goes(steps: list[tuple[str, int, float, int] | str]) -> None:
    door = Door(4, max_queued=6, max_in_flight_bytes=100, max_queued_bytes=90, per_caller=Bounds(max_in_flight=3))
    here: list[Asked] = []
    for number, step in enumerate(steps):
        door.clock.now_s += 0.5
        if isinstance(step, tuple):
            caller, priority, within_s, size_bytes = step
            _try_to_ask(door, here, caller=caller, priority=priority, within_s=within_s, input_bytes=size_bytes)
        elif step == "tick":
            door.admission.tick()
        else:
            chosen = [asked for asked in here if (asked.runs if step == "end" else asked.waits)]
            if chosen:
                _take_away(door, chosen[number % len(chosen)], here)
        here = [asked for asked in here if asked.heard[-1] != "refused"]
        _check(door, here)


def _try_to_ask(door: Door, here: list[Asked], **fields: object) -> None:
    with suppress(OverloadedError, DeadlineError):
        here.append(door.ask(**fields))  # type: ignore[arg-type]


def _take_away(door: Door, asked: Asked, here: list[Asked]) -> None:
    here.remove(asked)
    if asked.runs:
        door.end(asked)
    else:
        assert asked.ticket is not None
        door.admission.withdraw(asked.ticket)


def _check(door: Door, here: list[Asked]) -> None:
    running, waiting = [asked for asked in here if asked.runs], [asked for asked in here if asked.waits]
    figures = door.admission.snapshot()
    assert (figures.in_flight, figures.queued) == (len(running), len(waiting))
    assert figures.in_flight_bytes == sum(asked.claim.input_bytes for asked in running) <= 100
    assert figures.queued_bytes == sum(asked.claim.input_bytes for asked in waiting) <= 90
    assert len(running) <= 4
    assert len(waiting) <= 6
    assert all(count <= 3 for count in Counter(asked.claim.caller for asked in running).values())
    could_run = [asked for asked in waiting if sum(other.claim.caller == asked.claim.caller for other in running) < 3]
    assert not could_run or len(running) == 4 or figures.in_flight_bytes > 60
