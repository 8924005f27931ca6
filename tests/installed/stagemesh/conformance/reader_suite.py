"""Tests of the connector interface: successful reads, rejected reads, and the lifetime of the returned bytes."""

import asyncio
import gc
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any, TypeAlias

import numpy as np
import pytest
import pytest_asyncio

from stagemesh.common.errors import InvalidChunkError, NotReadyError, StagemeshError, UnavailableError
from stagemesh.common.plugins.connectors import AUTO, descriptor_of, registered
from stagemesh.conformance.replicas import (
    ARENA_BYTES,
    Connected,
    End,
    assert_same,
    content,
    exchange,
    open_flow,
    packet,
    receive_all,
    send_all,
    until,
)
from stagemesh.conformance.suite import BOUND_S, Suite
from stagemesh.connectors.arena.memory import PAGE_BYTES, data_offset
from stagemesh.connectors.base import ArenaRange, Bytes, FetchingReader, InPlaceReader, Reader

MIB = 1 << 20
_HUGE = (1 << 64) - 1
_SIZE_BYTES = 20_000
_REGION_BYTES = 5 * PAGE_BYTES
"""The size in bytes of the pages that contain `_SIZE_BYTES` bytes."""

Unconnected: TypeAlias = tuple[End, End]
"""A producer and a consumer that are not connected."""


class ReaderSuite(Suite):
    """Tests the readers of a connector. All connectors except `grpc` have readers."""

    @pytest_asyncio.fixture
    async def unconnected(self) -> AsyncGenerator[Unconnected]:
        """Yields a producer "a-0" and a consumer "b-0" that are not connected yet."""
        producer, consumer = End(self.connector, replica="a-0"), End(self.connector, replica="b-0")
        yield producer, consumer
        await consumer.close()
        await producer.close()

    @pytest_asyncio.fixture
    async def pair(self, unconnected: Unconnected) -> AsyncGenerator[Connected]:
        """Yields a producer, a consumer, and the consumer's reader of the producer's arena."""
        producer, consumer = unconnected
        reader = await consumer.connect(producer)
        yield Connected(producer, consumer, reader)
        await reader.close()

    @pytest_asyncio.fixture
    async def refusing(self, unconnected: Unconnected, monkeypatch: pytest.MonkeyPatch) -> None:
        """Makes every call of the connector's `connect` raise NotReadyError."""
        monkeypatch.setattr(type(unconnected[0].connector), "connect", _refuse)

    @pytest_asyncio.fixture
    async def place(self, pair: Connected) -> ArenaRange:
        """Returns a range of the producer's arena that contains the bytes of `content(_SIZE_BYTES, 1)`."""
        _, place = await pair.producer.write(content(_SIZE_BYTES, 1))
        return place

    # -- reads that succeed

    async def test_ranges_read_equal_the_written_bytes(self, pair: Connected) -> None:
        _, place = await pair.producer.write(content(MIB, 1))
        parts = [(0, MIB), (0, 1), (MIB - 1, 1), (4095, 2), (64, 4096), (7, 300_001), (500_000, 0), (7, 300_001)]
        places = [place._replace(offset=place.offset + start, size_bytes=size) for start, size in parts]
        found = await pair.read(*places)
        for (start, size), view in zip(parts, found, strict=True):
            np.testing.assert_array_equal(view, content(MIB, 1)[start : start + size])

    async def test_many_regions_are_read_together(self, pair: Connected) -> None:
        written = [await pair.producer.write(content(1 + n * 997 % 30_000, n)) for n in range(200)]
        found = await pair.read(*(place for _, place in written))
        for n, view in enumerate(found):
            np.testing.assert_array_equal(view, content(1 + n * 997 % 30_000, n))

    async def test_reads_overlap(self, pair: Connected) -> None:
        written = [await pair.producer.write(content(150_000, n)) for n in range(20)]
        found = await asyncio.gather(*(pair.read(place) for _, place in written))
        for n, [view] in enumerate(found):
            np.testing.assert_array_equal(view, content(150_000, n))

    async def test_empty_read_is_not_an_error(self, pair: Connected, place: ArenaRange) -> None:
        [view] = await pair.read(place._replace(size_bytes=0))
        assert view.nbytes == 0
        assert await pair.read() == []

    # -- reads and offers that are rejected

    @pytest.mark.parametrize(
        "changes",
        [
            {"offset": 0},
            {"offset": PAGE_BYTES},
            {"offset": -1},
            {"offset": 1 << 40},
            {"offset": _HUGE},
            {"size_bytes": _HUGE},
            {"size_bytes": 2 * ARENA_BYTES},
            {"size_bytes": -1},
            {"size_bytes": _REGION_BYTES + 1},
            {"offset": ARENA_BYTES, "size_bytes": ARENA_BYTES},
            {"offset": _HUGE, "size_bytes": _HUGE},
            {"offset": data_offset(ARENA_BYTES) + ARENA_BYTES, "size_bytes": 1},
            {"offset": data_offset(ARENA_BYTES) + ARENA_BYTES - PAGE_BYTES, "size_bytes": 1},
            {"generation": 0},
            {"generation": 0, "offset": data_offset(ARENA_BYTES) + ARENA_BYTES - PAGE_BYTES, "size_bytes": 1},
            {"generation": 7},
            {"generation": _HUGE},
            {"generation": _HUGE + 1},
        ],
        ids=str,
    )
    async def test_range_outside_the_region_is_rejected(
        self, pair: Connected, place: ArenaRange, changes: dict[str, int]
    ) -> None:
        with pytest.raises(InvalidChunkError):
            await pair.read(place._replace(**changes))
        with pytest.raises(InvalidChunkError):
            await pair.read(place, place._replace(**changes))
        await _assert_reads(pair, place, seed=1)

    async def test_freed_region_is_never_read_as_new_data(self, pair: Connected) -> None:
        written, old = await pair.producer.write(content(_SIZE_BYTES, 1))
        written.region.release()
        await _assert_stale(pair, old)
        again, new = await pair.producer.write(content(_SIZE_BYTES, 2))
        assert again.region.offset == old.offset, "the arena gives the same pages out again"
        await _assert_stale(pair, old)
        await _assert_stale(pair, new, old)
        await _assert_reads(pair, new, seed=2)

    async def test_region_that_is_overwritten_during_a_read_is_not_delivered(self, pair: Connected) -> None:
        if isinstance(pair.reader, InPlaceReader):
            pytest.skip("the lease holds the region while it is read in place")
        old, new = content(2 * MIB, 1), content(2 * MIB, 2)
        for turns in range(40):
            written, place = await pair.producer.write(old)
            reading = asyncio.create_task(pair.read(place))
            for _ in range(turns):
                await asyncio.sleep(0)
            written.region.release()
            over, _ = await pair.producer.write(new)
            try:
                [view] = await reading
                np.testing.assert_array_equal(view, old)
                del view
            except InvalidChunkError as exc:
                assert exc.reason == "STALE_REGION"  # noqa: PT017 - either is right
            over.region.release()
            del reading

    async def test_garbage_offer_is_rejected(self, unconnected: Unconnected) -> None:
        producer, consumer = unconnected
        offer = await producer.connector.offer()
        wrong_start, cut = b"\0" + offer[1:], (offer[: len(offer) // 2], offer[:-1])
        for garbage in (b"", b"\xff\xff\xff", bytes(len(offer)), wrong_start, *cut, b"x" * 5000):
            with pytest.raises(NotReadyError) as refused:
                await consumer.connector.connect(garbage, producer.as_producer())
            assert refused.value.reason == "CONNECTOR_UNAVAILABLE"
            assert producer.replica in refused.value.message
        reader = await consumer.connect(producer)
        await reader.close()

    async def test_producer_that_passes_no_arena_is_read_otherwise_or_rejected(self, unconnected: Unconnected) -> None:
        producer, consumer = unconnected
        _, place = await producer.write(content(_SIZE_BYTES, 1))
        offer = await producer.connector.offer()
        try:
            reader = await consumer.connector.connect(offer, producer.as_producer(with_arena=False))
        except NotReadyError as exc:
            assert exc.reason == "CONNECTOR_UNAVAILABLE"  # noqa: PT017 - either is right
            return
        await _assert_reads(Connected(producer, consumer, reader), place, seed=1)
        await reader.close()

    async def test_previous_incarnation_is_another_producer(self, pair: Connected, place: ArenaRange) -> None:
        successor = End(self.connector, replica=pair.producer.replica, incarnation="2")
        _, other = await successor.write(content(_SIZE_BYTES, 2))
        reader = await pair.consumer.connect(successor)
        await _assert_reads(replace(pair, reader=reader), other, seed=2)
        await _assert_reads(pair, place, seed=1)
        await reader.close()
        await successor.close()
        await _assert_reads(pair, place, seed=1)

    # -- lifetimes

    async def test_views_outlive_reader_connector_and_arena(self, pair: Connected, place: ArenaRange) -> None:
        views = await pair.read(place)
        view = views.pop()[100:]
        await pair.reader.close()
        await pair.consumer.close()
        await pair.producer.close()
        gc.collect()
        np.testing.assert_array_equal(view, content(_SIZE_BYTES, 1)[100:])

    async def test_fetched_memory_is_freed_with_its_last_view(self, pair: Connected, place: ArenaRange) -> None:
        views = await pair.read(place, place)
        part = views[1][5:]
        views.clear()
        gc.collect()
        np.testing.assert_array_equal(part, content(_SIZE_BYTES, 1)[5:])
        del part
        await pair.consumer.settled()

    async def test_views_in_place_hold_the_region_and_copies_do_not(self, pair: Connected) -> None:
        in_place = isinstance(pair.reader, InPlaceReader)
        async with self.hosts() as (a, b):
            outlet, inlet = open_flow(a, b, connector=self.connector)
            sender = asyncio.create_task(send_all(outlet, [packet(0, 50_000)]))
            view = (await anext(aiter(inlet))).tensors["x"][1000:]
            assert await receive_all(inlet) == []
            await sender
            if in_place:
                assert a.plane.arena.used_bytes > 0
            else:
                await until(lambda: not a.plane.arena.used_bytes, timeout_s=BOUND_S)
            assert view.tobytes() == packet(0, 50_000).tensors["x"][1000:].tobytes()
            del view
            await asyncio.gather(a.settled(), b.settled())

    async def test_closing_twice_is_harmless_and_ends_reading(self, pair: Connected, place: ArenaRange) -> None:
        for _ in range(2):
            await pair.reader.close()
        with pytest.raises(StagemeshError):
            await pair.read(place)
        for _ in range(2):
            await pair.consumer.connector.close()
            await pair.producer.connector.close()

    @pytest.mark.parametrize("turns", [0, 1, 3, 10])
    async def test_reader_closes_while_reads_are_in_flight(self, pair: Connected, turns: int) -> None:
        _, place = await pair.producer.write(content(2 * MIB, 1))
        reads = [asyncio.create_task(pair.read(place)) for _ in range(2)]
        for _ in range(turns):
            await asyncio.sleep(0)
        await pair.reader.close()
        async with asyncio.timeout(BOUND_S):
            found = await asyncio.gather(*reads, return_exceptions=True)
        for views in found:
            if isinstance(views, BaseException):
                assert isinstance(views, UnavailableError | InvalidChunkError)
            else:
                np.testing.assert_array_equal(views[0], content(2 * MIB, 1))

    @pytest.mark.parametrize("turns", [0, 1, 3, 10])
    async def test_cancelled_read_frees_its_memory(self, pair: Connected, turns: int) -> None:
        _, place = await pair.producer.write(content(2 * MIB, 1))
        reading = asyncio.create_task(pair.read(place))
        for _ in range(turns):
            await asyncio.sleep(0)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        del reading
        await pair.consumer.settled()
        await _assert_reads(pair, place, seed=1)

    async def test_producer_accepts_several_readers_and_reconnection(self, unconnected: Unconnected) -> None:
        producer, consumer = unconnected
        _, place = await producer.write(content(_SIZE_BYTES, 1))
        first, second = await asyncio.gather(consumer.connect(producer), consumer.connect(producer))
        await first.close()
        await _assert_reads(Connected(producer, consumer, second), place, seed=1)
        await second.close()
        third = await consumer.connect(producer)
        await _assert_reads(Connected(producer, consumer, third), place, seed=1)
        await third.close()

    # -- connectors that cannot be used

    async def test_missing_installation_is_an_error_with_the_remedy(self) -> None:
        lacking = replace(descriptor_of(self.connector), module="stagemesh_not_installed", remedy="install the thing")
        with registered(lacking):
            await self._assert_unusable("install the thing")

    async def test_failed_connection_is_an_error_with_the_reason(self, refusing: None) -> None:
        del refusing
        await self._assert_unusable("the moon is full.*auto")

    async def test_auto_uses_another_connector_if_this_one_fails(self, refusing: None) -> None:
        del refusing
        sent = [packet(seq, 50_000) for seq in range(5)]
        async with self.hosts() as (a, b):
            outlet, inlet = open_flow(a, b, connector=AUTO)
            assert_same(await exchange(outlet, inlet, sent), sent)
            assert outlet.attempt.connector != self.connector

    async def test_flow_with_failed_reads_continues(self, pair: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
        if not isinstance(pair.reader, FetchingReader):
            pytest.skip("a read in place cannot fail")
        kind = type(pair.reader)
        fetch, reads = kind.fetch, iter(range(3))

        async def fails_later(reader: FetchingReader, *args: Any) -> list[Bytes]:
            if next(reads, None) is None:
                raise UnavailableError("the wire was cut", reason="CONNECTOR_FAILED")
            return await fetch(reader, *args)

        monkeypatch.setattr(kind, "fetch", fails_later)
        monkeypatch.setattr(kind, "fetch_at_once", FetchingReader.fetch_at_once)
        sent = [packet(seq, 50_000) for seq in range(10)]
        with registered(replace(descriptor_of(self.connector), rank=0)):
            async with self.hosts() as (a, b):
                outlet, inlet = open_flow(a, b, connector=AUTO)
                assert_same(await exchange(outlet, inlet, sent), sent)
                assert outlet.attempt.connector != self.connector
                await asyncio.gather(a.settled(), b.settled())

    async def _assert_unusable(self, reason: str) -> None:
        """Asserts that a flow with the connector under test fails with NotReadyError.

        `reason` is a regular expression that must match the error's message.
        """
        async with self.hosts() as (a, b):
            outlet, inlet = open_flow(a, b, connector=self.connector)
            with pytest.raises(NotReadyError, match=reason) as refused:
                await send_all(outlet, [packet(0)])
            assert refused.value.reason == "CONNECTOR_UNAVAILABLE"
            await inlet.aclose()


async def _assert_reads(pair: Connected, place: ArenaRange, *, seed: int) -> None:
    [view] = await pair.read(place)
    np.testing.assert_array_equal(view, content(place.size_bytes, seed))


async def _assert_stale(pair: Connected, *places: ArenaRange) -> None:
    with pytest.raises(InvalidChunkError) as refused:
        await pair.read(*places)
    assert refused.value.reason == "STALE_REGION"


async def _refuse(*_: object) -> Reader:
    raise NotReadyError("the moon is full", reason="CONNECTOR_UNAVAILABLE")
