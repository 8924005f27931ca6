"""The harness itself: relays apply the faults that a test sets and forward everything else."""

import asyncio
import os
from collections.abc import AsyncIterator

import pytest

from stagemesh.v1 import stage_pb2
from tests.connectors.local_sockets import connect, listen
from tests.connectors.relay_faults import CutError, Direction, Fault, Faults, pump, split


def _message(n: int) -> bytes:
    return stage_pb2.PutChunkRequest(hello=stage_pb2.Hello(replica=str(n))).SerializeToString()


async def _pumped(faults: Faults, count: int = 4) -> list[int]:
    passed: list[int] = []

    async def source() -> AsyncIterator[bytes]:
        for n in range(count):
            yield _message(n)

    async def sink(message: bytes) -> None:
        passed.append(int(stage_pb2.PutChunkRequest.FromString(message).hello.replica))

    try:
        await pump(source(), sink, faults=faults, direction=Direction.REQUESTS)
    except CutError:
        passed.append(-1)
    return passed


@pytest.mark.parametrize(
    ("fault", "index", "passed"),
    [
        (None, 0, [0, 1, 2, 3]),
        (Fault.DROP, 1, [0, 2, 3]),
        (Fault.DUPLICATE, 1, [0, 1, 1, 2, 3]),
        (Fault.SWAP, 1, [0, 2, 1, 3]),
        (Fault.SWAP, 3, [0, 1, 2, 3]),
        (Fault.CUT, 2, [0, 1, -1]),
    ],
)
async def test_fault_affects_the_named_message(fault: Fault | None, index: int, passed: list[int]) -> None:
    assert await _pumped(Faults(fault, Direction.REQUESTS, index)) == passed


def test_batched_items_are_affected_one_by_one() -> None:
    items = [stage_pb2.PutItem(demand=stage_pb2.CreditDemand(size_bytes=n)) for n in range(3)]
    batch = stage_pb2.PutChunkRequest(hello=stage_pb2.Hello(replica="a"), items=items)
    parts = [
        stage_pb2.PutChunkRequest.FromString(part) for part in split(batch.SerializeToString(), Direction.REQUESTS)
    ]
    assert [len(part.items) for part in parts] == [0, 1, 1, 1]
    assert parts[0].hello.replica == "a"


async def test_descriptor_arrives_before_the_messages() -> None:
    name = f"stagemesh-test-{os.getpid()}"
    with listen(name) as listener, connect(name) as one, await listener.accept() as other:
        one.send_descriptor(one.raw.fileno())
        received = await other.receive_descriptor()
        assert os.fstat(received).st_ino == os.fstat(one.raw.fileno()).st_ino
        os.close(received)
        writing = asyncio.create_task(one.write_frame(b"x" * 200_000))
        frames = other.frames()
        assert await anext(frames) == b"x" * 200_000
        await writing
