"""A request's rows at the replica: each exactly once and in order, whenever they arrive."""

import asyncio

import numpy as np
import pytest

from stagemesh.common.errors import UnavailableError
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.vllm.hidden_states.request_states import RequestStates


def push(states: RequestStates, position: int, count: int) -> None:
    rows = np.arange(position, position + count, dtype=np.float32)[:, np.newaxis]
    states.push(position, {"hidden_states": rows})


async def test_rows_that_arrive_during_a_read_are_read_too() -> None:
    states = RequestStates(first_position=0, prompt_tokens=2)
    push(states, 0, 2)
    taken: list[float] = []
    async for packet in states.up_to(4):
        taken += packet.tensors["hidden_states"][:, 0].tolist()
        if states.next_position == 2:
            push(states, 2, 2)
    assert taken == [0, 1, 2, 3]


async def test_repeated_rows_are_dropped_and_rows_past_the_end_stay() -> None:
    states = RequestStates(first_position=0, prompt_tokens=2)
    push(states, 0, 3)
    push(states, 1, 4)
    first = [packet async for packet in states.up_to(4)]
    assert np.concatenate([packet.tensors["hidden_states"][:, 0] for packet in first]).tolist() == [0, 1, 2, 3]
    rest = states.take(before=5)
    assert [packet.metadata["token_start"] for packet in rest] == [4]


async def test_waiting_raises_the_error_of_the_worker() -> None:
    states = RequestStates(first_position=0, prompt_tokens=1)

    async def first() -> Packet:
        return await anext(states.up_to(1))

    waiting = asyncio.create_task(first())
    await asyncio.sleep(0)
    assert not waiting.done()
    states.fail(UnavailableError("the worker ended"))
    with pytest.raises(UnavailableError, match="the worker ended"):
        await waiting
