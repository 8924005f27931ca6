"""A client may append a window of bytes beyond those that were consumed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.errors import OverloadedError
from stagemesh.orchestrator.session.turn_input import Credit


def test_pieces_beyond_the_window_are_rejected() -> None:
    credit = Credit(10)
    credit.add(6, packet_bytes=6)
    with pytest.raises(OverloadedError):
        credit.check(5)
    credit.check(4)


def test_the_limit_is_raised_after_half_of_the_window() -> None:
    credit = Credit(10)
    credit.add(4)
    assert not credit.raise_limit()
    credit.add(1)
    assert credit.raise_limit()
    assert credit.limit_bytes == 15


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=9), st.data())
def test_consumed_packets_return_the_sizes_of_their_pieces(pieces: list[tuple[int, int]], data: st.DataObject) -> None:
    credit = Credit(1000)
    for size_bytes, packet_bytes in pieces:
        credit.add(size_bytes, packet_bytes=packet_bytes)
    left = sum(packet_bytes for _, packet_bytes in pieces)
    while left:
        part = data.draw(st.integers(1, left))
        credit.consume(part)
        left -= part
    credit.add(500)
    assert credit.raise_limit()
    assert credit.limit_bytes == 1000 + credit.received_bytes
