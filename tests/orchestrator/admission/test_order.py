"""Whose turn it is, and that it comes."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from stagemesh.orchestrator.admission import TicketState
from stagemesh.orchestrator.spec import Bounds
from tests.orchestrator.admission.doors import Asked, Door


def _fill(door: Door, *asks: dict[str, object]) -> list[str]:
    """The order in which requests that come while the pipeline is full are served."""
    first = door.ask("first")
    return door.serve([door.ask(**ask) for ask in asks], first=first)  # type: ignore[arg-type]


def test_equals_go_in_the_order_of_arrival() -> None:
    assert _fill(Door(), {"name": "a"}, {"name": "b"}, {"name": "c"}) == ["a", "b", "c"]


def test_higher_priority_goes_first() -> None:
    order = _fill(Door(), {"name": "low", "priority": -1}, {"name": "usual"}, {"name": "high", "priority": 3})
    assert order == ["high", "usual", "low"]


def test_the_earliest_deadline_goes_first_within_a_priority() -> None:
    order = _fill(
        Door(),
        {"name": "late", "within_s": 90.0},
        {"name": "never"},
        {"name": "soon", "within_s": 9.0},
        {"name": "high", "priority": 1, "within_s": 500.0},
    )
    assert order == ["high", "soon", "late", "never"]


def test_priorities_beyond_the_range_count_as_its_ends() -> None:
    order = _fill(Door(), {"name": "ten", "priority": 10}, {"name": "million", "priority": 1_000_000})
    assert order == ["ten", "million"]


def test_a_caller_with_many_waiting_takes_turns_with_one_who_comes_later() -> None:
    asks: list[dict[str, object]] = [{"name": f"a{n}", "caller": "a"} for n in range(20)]
    order = _fill(Door(), *asks, {"name": "b0", "caller": "b"}, {"name": "b1", "caller": "b"})
    assert {order.index("b0"), order.index("b1")} <= set(range(5))


def test_one_who_has_nothing_running_goes_before_one_who_has_much() -> None:
    door = Door(8)
    running = [door.ask(caller="a") for _ in range(8)]
    waiting = [door.ask(caller="a") for _ in range(8)] + [door.ask(f"b{n}", caller="b") for n in range(8)]
    for asked in running[:4]:
        door.end(asked)
    assert [name for name in door.order if name.startswith("b")] == ["b0", "b1", "b2", "b3"]
    assert sum(asked.runs for asked in waiting) == 4


def test_a_full_pipeline_is_shared_evenly_by_those_who_want_it() -> None:
    door = Door(12)
    asked = [door.ask(caller="greedy") for _ in range(200)]
    asked += [door.ask(caller=caller) for caller in ("b", "c") for _ in range(40)]
    for _ in range(40):
        door.end(next(each for each in asked if each.runs))
        asked = [each for each in asked if each.ticket is None or each.ticket.state is not TicketState.GONE]
    assert Counter(each.claim.caller for each in asked if each.runs) == {"greedy": 4, "b": 4, "c": 4}


def test_one_of_many_bytes_counts_for_as_much() -> None:
    door = Door(10, max_in_flight_bytes=100)
    first = [door.ask(caller="large", input_bytes=60), door.ask(caller="small", input_bytes=10)]
    first += [door.ask(caller="small", input_bytes=10) for _ in range(3)]
    waiting = [door.ask(caller="large", input_bytes=10), door.ask(caller="small", input_bytes=10)]
    door.end(first[1])
    assert [asked.runs for asked in waiting] == [False, True]


def test_nobody_passes_one_who_waits_for_bytes() -> None:
    door = Door(10, max_in_flight_bytes=100)
    first = [door.ask(input_bytes=50), door.ask(input_bytes=50)]
    large, small = door.ask(input_bytes=90), door.ask(input_bytes=10)
    door.end(first[0])
    assert (large.waits, small.waits) == (True, True)
    door.end(first[1])
    assert (large.runs, small.runs) == (True, True)


def test_one_of_higher_priority_who_fits_runs_at_once() -> None:
    door = Door(10, max_in_flight_bytes=100)
    door.ask(input_bytes=50)
    large, urgent = door.ask(input_bytes=90), door.ask(input_bytes=10, priority=1)
    assert (large.waits, urgent.runs) == (True, True)


def test_who_is_at_a_limit_of_its_own_holds_up_nobody_else() -> None:
    door = Door(2, per_caller=Bounds(max_in_flight=1))
    first = door.ask(caller="a", priority=9)
    second = door.ask(caller="a", priority=9)
    other = door.ask(caller="b")
    assert (second.waits, other.runs) == (True, True)
    door.end(first)
    assert second.runs


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.sampled_from("abc"), st.integers(-2, 2), st.sampled_from([5.0, 50.0, 500.0])),
            st.sampled_from(["end", "leave"]),
        ),
        max_size=150,
    )
)
def test_nobody_is_passed_by_more_than_eight_for_each_who_came_before(
    steps: list[tuple[str, int, float] | str],
) -> None:
    door = Door()
    running = door.ask()
    waiting: list[tuple[Asked, int, int]] = []
    for step in steps:
        if isinstance(step, tuple):
            caller, priority, within_s = step
            ahead, passed = len(waiting), len(door.order)
            waiting.append((door.ask(caller=caller, priority=priority, within_s=within_s), ahead, passed))
        elif step == "leave" and waiting:
            asked, _, _ = waiting.pop(len(waiting) // 2)
            assert asked.ticket is not None
            assert door.admission.withdraw(asked.ticket)
        elif waiting:
            door.end(running)
            running = next(asked for asked, _, _ in waiting if asked.runs)
            waiting = [each for each in waiting if each[0].waits]
        for _, ahead, passed in waiting:
            assert len(door.order) - passed < 8 * (ahead + 1)


def test_the_lowest_priority_gets_its_turn_under_a_stream_of_the_highest() -> None:
    door = Door()
    running = door.ask()
    low = door.ask("low", priority=-10)
    for _ in range(7):
        urgent = door.ask(priority=10)
        door.end(running)
        assert urgent.runs
        running = urgent
    door.ask(priority=10)
    door.end(running)
    assert low.runs
