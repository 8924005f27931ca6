"""Packets that arrive: each row of successive producers once and in order, and several flows at once."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.errors import InvalidChunkError, NotReadyError, UnavailableError
from stagemesh.connectors.flow.inlet import merge
from stagemesh.connectors.flow.received_rows import PacketQueue
from stagemesh.connectors.packets import CONTEXT, MetadataValue, Packet, RowCounter, rows_of

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


class Receiver(PacketQueue):
    """The packets of one edge, whose producer counts the rows that it sends."""

    def __init__(self) -> None:
        super().__init__(edge="e")
        self._positions = RowCounter({})

    def begin(self, first_rows: Mapping[str, int]) -> None:
        super().begin(first_rows)
        self._positions = RowCounter(first_rows)

    def take(self, packet: Packet) -> Packet | None:
        """Returns the new part of a packet that follows the one before."""
        context = packet.metadata.get(CONTEXT, 0)
        assert isinstance(context, int)
        rows = rows_of(packet)
        return self.new_part(packet, rows, self._positions.add(rows, context=context))


lengths = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=8)


@given(data=st.data(), total=st.tuples(st.integers(0, 20), st.integers(0, 20)))
def test_each_row_is_delivered_once_and_in_order(data: st.DataObject, total: tuple[int, int]) -> None:
    rows, count = dict(zip(_NAMES, total, strict=True)), Receiver()
    taken: list[Packet] = []
    begin = dict.fromkeys(_NAMES, 0)
    for _ in range(data.draw(st.integers(0, 3))):
        coming = packets(begin, cut({name: rows[name] - begin[name] for name in _NAMES}, data.draw(lengths)))
        for one in coming[: data.draw(st.integers(0, len(coming)))]:
            new = count.take(one)
            taken += [new] if new is not None else []
        here = dict.fromkeys(_NAMES, 0)
        for one in taken:
            for name, number in rows_of(one):
                here[name] += number
        begin = {name: data.draw(st.integers(0, here[name])) for name in _NAMES}
        count.check_rows(begin)
        count.begin(begin)
    for one in packets(begin, cut({name: rows[name] - begin[name] for name in _NAMES}, data.draw(lengths))):
        new = count.take(one)
        taken += [new] if new is not None else []
    count.accept_end()
    for name in _NAMES:
        parts = [np.arange(0), *(one.tensors[name] for one in taken)]
        assert np.concatenate(parts).tolist() == list(range(rows[name]))


@pytest.fixture
def count() -> Receiver:
    return Receiver()


def test_packet_without_new_rows_is_dropped(count: Receiver) -> None:
    one = Packet({"x": np.arange(3), "n": np.array(7)})
    assert count.take(one) is one
    count.begin({})
    assert count.take(one) is None
    count.accept_end()
    assert count.take(one) is one


def test_repeated_context_is_counted_from_the_beginning_alone(count: Receiver) -> None:
    chunks = [_with(Packet({"x": np.arange(start, start + 4)}), context_frames=bool(start)) for start in (0, 3)]
    assert [count.take(one) for one in chunks] == chunks
    with pytest.raises(NotReadyError):
        count.check_rows({"x": 4})
    count.begin({})
    assert [count.take(one) for one in chunks] == [None, None]
    count.accept_end()


@pytest.mark.parametrize(
    ("first_row", "context"),
    [(12, None), (9, None), (0, None), (2**64 - 2, None), (10, 2), (9, 4)],
    ids=["missing rows", "repeated row", "row 0 again", "beyond all rows", "context of other rows", "too much context"],
)
def test_rows_that_do_not_follow_are_rejected(count: Receiver, first_row: int, context: int | None) -> None:
    count.new_part(Packet({"x": np.arange(3)}), [("x", 3)], [7])
    metadata: dict[str, MetadataValue] = {} if context is None else {"context_frames": context}
    with pytest.raises(InvalidChunkError, match="row 10 is next"):
        count.new_part(Packet({"x": np.arange(3)}, metadata), [("x", 3)], [first_row])
    assert count.new_part(Packet({"x": np.arange(3)}), [("x", 3)], [10]) is not None


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
