"""Several flows that are read at once."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import numpy as np
import pytest

from stagemesh.common.errors import UnavailableError
from stagemesh.connectors.flow.inlet import merge
from stagemesh.connectors.packets import Packet


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
