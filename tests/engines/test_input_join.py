"""The inputs of a stage with several incoming edges: joined packets, packets apart, and absent tensors."""

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator, Iterable
from contextlib import aclosing

import numpy as np
import pytest

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.plugins.descriptors import Signature
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.input_join import packets_of
from tests.engines.support import OpenEdge

NUMBERS = TensorSpec("float32", ("count",))
BOTH = Signature(accepts={"x": NUMBERS, "y": NUMBERS})
EITHER = Signature(accepts={"x": NUMBERS, "y": NUMBERS}, optional=frozenset({"x", "y"}))
BOUND_S = 5


class Edge(OpenEdge):
    """An incoming edge with packets of one tensor of one number."""

    def __init__(self, tensor: str, *values: float) -> None:
        super().__init__()
        self._tensor = tensor
        self.bring(*values)

    def bring(self, *values: float) -> None:
        for value in values:
            self.send(Packet({self._tensor: np.array([value], np.float32)}))


def ended(tensor: str, *values: float, error: Exception | None = None) -> Edge:
    """Returns an edge that ends after these values."""
    edge = Edge(tensor, *values)
    edge.end(error)
    return edge


def values(packets: Iterable[Packet]) -> list[dict[str, float]]:
    return [{name: float(tensor[0]) for name, tensor in packet.tensors.items()} for packet in packets]


async def all_of(task: Task, signature: Signature) -> list[dict[str, float]]:
    async with asyncio.timeout(BOUND_S):
        return values([packet async for packet in packets_of(task, signature)])


async def test_joined_edges_make_one_input_from_a_packet_of_each() -> None:
    task = Task("r", 0, inlets={"left": ended("x", 1, 2), "right": ended("y", 10, 20)})
    assert await all_of(task, BOTH) == [{"x": 1, "y": 10}, {"x": 2, "y": 20}]


async def test_a_joined_edge_that_ends_early_is_named() -> None:
    with pytest.raises(InvalidChunkError, match="edge right ended sooner than left"):
        await all_of(Task("r", 0, inlets={"left": ended("x", 1), "right": ended("y")}), BOTH)


async def test_packets_of_edges_apart_keep_their_arrival_order() -> None:
    left, right = Edge("x"), Edge("y")
    task = Task("r", 0, inlets={"left": left, "right": right}, apart=frozenset({"left", "right"}))
    async with asyncio.timeout(BOUND_S), aclosing(packets_of(task, EITHER)) as packets:
        right.bring(10)
        first = await anext(packets)
        left.bring(1)
        second = await anext(packets)
        left.end()
        right.bring(20)
        right.end()
        assert values([first, second, *[packet async for packet in packets]]) == [{"y": 10}, {"x": 1}, {"y": 20}]


async def test_an_edge_apart_does_not_wait_for_joined_edges() -> None:
    left, right, aside = Edge("x"), Edge("y"), Edge("x")
    task = Task("r", 0, inlets={"left": left, "right": right, "aside": aside}, apart=frozenset({"aside"}))
    async with asyncio.timeout(BOUND_S), aclosing(packets_of(task, EITHER)) as packets:
        left.bring(1)
        aside.bring(7)
        first = await anext(packets)
        right.bring(10)
        second = await anext(packets)
        for edge in (left, right, aside):
            edge.end()
        assert values([first, second, *[packet async for packet in packets]]) == [{"x": 7}, {"x": 1, "y": 10}]


async def test_a_missing_required_tensor_is_named() -> None:
    with pytest.raises(InvalidChunkError, match="'y' is missing; the packet contains x"):
        await all_of(Task("r", 0, inlets={"left": ended("x", 1)}), BOTH)


async def test_a_failed_edge_ends_the_reading_of_all_edges() -> None:
    inlets = {"left": ended("x", error=InvalidChunkError("left is broken")), "right": Edge("y")}
    task = Task("r", 0, inlets=inlets, apart=frozenset(inlets))
    with pytest.raises(InvalidChunkError, match="left is broken"):
        await all_of(task, EITHER)
    assert len(asyncio.all_tasks()) == 1


async def ready(tensor: str, *values: float) -> AsyncIterator[Packet]:
    """Yields packets, and does not retain those that were read."""
    packets = deque(Packet({tensor: np.array([value], np.float32)}) for value in values)
    while packets:
        yield packets.popleft()


async def test_a_used_packet_is_released_before_the_next() -> None:
    task = Task("r", 0, inlets={"left": ready("x", 1), "right": ready("y", 2)}, apart=frozenset({"left", "right"}))
    async with aclosing(packets_of(task, EITHER)) as packets:
        first = weakref.ref((await anext(packets)).tensors["x"])
        assert values([await anext(packets)]) == [{"y": 2}]
        assert first() is None


async def test_a_caller_that_stops_reading_leaves_no_reader_running() -> None:
    inlets = {"left": Edge("x", 1), "right": Edge("y")}
    task = Task("r", 0, inlets=inlets, apart=frozenset(inlets))
    async with asyncio.timeout(BOUND_S), aclosing(packets_of(task, EITHER)) as packets:
        await anext(packets)
    assert len(asyncio.all_tasks()) == 1
