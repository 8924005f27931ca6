"""A pool is a set from which items are drawn evenly."""

import random
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from stagemesh.orchestrator.fleet.replica_registry import RandomPool


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9))))
def test_a_pool_contains_the_items_of_a_set(changes: list[tuple[bool, int]]) -> None:
    pool, expected = RandomPool[int](), set[int]()
    for adds, item in changes:
        (pool.add if adds else pool.discard)(item)
        (expected.add if adds else expected.discard)(item)
        assert (len(pool), set(pool)) == (len(expected), expected)
        assert all((item in pool) is (item in expected) for item in range(10))


@given(st.sets(st.integers(0, 99)), st.integers(0, 10))
def test_drawn_items_are_different_and_as_many_as_there_are(items: set[int], count: int) -> None:
    pool = RandomPool[int]()
    for item in items:
        pool.add(item)
    drawn = pool.draw(count, random.Random(1))
    assert len(drawn) == len(set(drawn)) == min(count, len(items))
    assert set(drawn) <= items


def test_all_items_are_drawn_equally_often() -> None:
    pool, rng = RandomPool[int](), random.Random(1)
    for item in range(20):
        pool.add(item)
    pool.discard(3)
    drawn = Counter(item for _ in range(4000) for item in pool.draw(2, rng))
    assert set(drawn) == set(range(20)) - {3}
    assert max(drawn.values()) < 1.5 * min(drawn.values())
