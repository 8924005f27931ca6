"""Packets that arrive: each row of successive producers once and in order, and several flows at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.errors import InvalidChunkError, NotReadyError, UnavailableError
from stagemesh.connectors.flow.inlet import merge
from stagemesh.connectors.flow.received_rows import PacketQueue, add_rows
from stagemesh.connectors.packets import MetadataValue, Packet
from tests.rpc.call_errors import raises

_NAMES: tuple[str, ...] = ("x", "y")


def packets(starts: dict[str, int], cuts: list[dict[str, int]]) -> list[Packet]:
    """Returns packets of the given lengths whose rows are numbered from `starts` on."""
    at, made = dict(starts), list[Packet]()
    for cut in cuts:
        made.append(Packet({name: np.arange(at[name], at[name] + rows) for name, rows in cut.items()}))
        for name, rows in cut.items():
            at[name] += rows
    return made


def cut(rows: dict[str, int], lengths: list[tuple[int, int]]) -> list[dict[str, int]]:
    """Returns the rows in packets of these lengths, and the remaining rows in a last packet."""
    left, cuts = dict(rows), list[dict[str, int]]()
    for pair in lengths:
        cuts.append({name: min(length, left[name]) for name, length in zip(_NAMES, pair, strict=True)})
        for name in _NAMES:
            left[name] -= cuts[-1][name]
    return [*cuts, left]


lengths = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8)


@given(data=st.data(), total=st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_each_row_is_delivered_once_and_in_order(data: st.DataObject, total: tuple[int, int]) -> None:
    rows, count = dict(zip(_NAMES, total, strict=True)), PacketQueue(edge="e")
    taken: list[Packet] = []
    begin = dict.fromkeys(_NAMES, 0)
    for _ in range(data.draw(st.integers(0, 3))):
        coming = packets(begin, cut({name: rows[name] - begin[name] for name in _NAMES}, data.draw(lengths)))
        for one in coming[: data.draw(st.integers(0, len(coming)))]:
            new = count.new_part(one)
            taken += [new] if new is not None else []
        here = dict.fromkeys(_NAMES, 0)
        for one in taken:
            add_rows(here, one)
        begin = {name: data.draw(st.integers(0, here[name])) for name in _NAMES}
        count.check_rows(begin)
        count.begin(begin)
    for one in packets(begin, cut({name: rows[name] - begin[name] for name in _NAMES}, data.draw(lengths))):
        new = count.new_part(one)
        taken += [new] if new is not None else []
    count.accept_end()
    for name in _NAMES:
        parts = [np.arange(0), *(one.tensors[name] for one in taken)]
        assert np.concatenate(parts).tolist() == list(range(rows[name]))


@pytest.fixture
def count() -> PacketQueue:
    return PacketQueue(edge="e")


def test_packet_without_new_rows_is_dropped(count: PacketQueue) -> None:
    one = Packet({"x": np.arange(3), "n": np.array(7)})
    assert count.new_part(one) is one
    count.begin({})
    assert count.new_part(one) is None
    count.accept_end()
    assert count.new_part(one) is one


def test_missing_rows_are_reported(count: PacketQueue) -> None:
    count.new_part(Packet({"x": np.arange(3)}))
    count.check_rows({"x": 3})
    with pytest.raises(NotReadyError, match="begins at row 4 of tensor 'x', but only 3 of its rows") as caught:
        count.check_rows({"x": 4})
    assert caught.value.reason == "ROWS_MISSING"
    assert caught.value.metadata == {"edge": "e", "tensor": "x", "rows": "3"}


def test_repeated_context_is_counted_from_the_beginning_alone(count: PacketQueue) -> None:
    chunks = [_with(Packet({"x": np.arange(start, start + 4)}), context_frames=bool(start)) for start in (0, 3)]
    assert [count.new_part(one) for one in chunks] == chunks
    with pytest.raises(NotReadyError):
        count.check_rows({"x": 4})
    count.begin({})
    assert [count.new_part(one) for one in chunks] == [None, None]
    count.accept_end()


def test_context_cut_at_other_rows_is_rejected(count: PacketQueue) -> None:
    count.new_part(_with(Packet({"x": np.arange(4)}), context_frames=0))
    count.begin({})
    with raises(InvalidChunkError, reason="ATTEMPTS_DIFFER"):
        count.new_part(_with(Packet({"x": np.arange(6)}), context_frames=2))


def test_token_at_which_a_packet_starts_moves_with_its_rows(count: PacketQueue) -> None:
    count.new_part(_with(Packet({"x": np.arange(5)}), token_start=0))
    count.begin({"x": 3})
    new = count.new_part(_with(Packet({"x": np.arange(3, 8)}), token_start=3))
    assert new is not None
    assert (new.tensors["x"].tolist(), new.metadata["token_start"]) == ([5, 6, 7], 5)


def test_producer_with_fewer_rows_than_before_is_rejected(count: PacketQueue) -> None:
    count.new_part(Packet({"x": np.arange(5)}))
    count.begin({})
    count.new_part(Packet({"x": np.arange(4)}))
    with raises(InvalidChunkError, reason="ATTEMPTS_DIFFER", match="fewer rows"):
        count.accept_end()


def _with(packet: Packet, **metadata: MetadataValue) -> Packet:
    return Packet(packet.tensors, metadata)


async def _one_packet() -> AsyncIterator[Packet]:
    yield Packet({"x": np.zeros(1, np.float32)})


async def _failing(after: asyncio.Event) -> AsyncIterator[Packet]:
    await after.wait()
    raise UnavailableError("the producer is gone", reason="PEER_LOST")
    yield


async def test_an_error_of_one_source_stops_the_reading_of_the_others() -> None:
    reads, stopped = asyncio.Event(), asyncio.Event()

    async def endless() -> AsyncIterator[Packet]:
        try:
            reads.set()
            await asyncio.Event().wait()
            yield Packet({})
        finally:
            stopped.set()

    with pytest.raises(UnavailableError, match="the producer is gone"):
        async with aclosing(merge([_one_packet(), endless(), _failing(reads)])) as packets:
            assert (await anext(packets)).tensors["x"].shape == (1,)
            await anext(packets)
    assert stopped.is_set()
