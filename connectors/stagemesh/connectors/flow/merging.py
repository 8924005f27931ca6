"""Reads several flows at once."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from stagemesh.connectors.edge import Packet


async def merge(sources: Sequence[AsyncIterator[Packet]]) -> AsyncGenerator[Packet, None]:
    """Yields the packets of all sources in arrival order. Reads at most one packet ahead from each source.

    Iterate within `contextlib.aclosing`, which stops the tasks that read from the sources. Raises the first error of a
    source.
    """
    if len(sources) == 1:
        async for only in sources[0]:
            yield only
        return
    reading = {asyncio.ensure_future(_next(source)): source for source in sources}
    try:
        while reading:
            await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
            # Packets are processed one at a time, because a packet may have a lease and must not be retained after use.
            task = next(task for task in reading if task.done())
            source = reading.pop(task)
            packet = task.result()
            if packet is not None:
                reading[asyncio.ensure_future(_next(source))] = source
                yield packet
            del packet, task
    finally:
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)


async def _next(source: AsyncIterator[Packet]) -> Packet | None:
    return await anext(source, None)
