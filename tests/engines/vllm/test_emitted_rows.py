"""A request's rows at the replica: each exactly once and in order, whenever they arrive."""

import asyncio

import numpy as np
import pytest

from stagemesh.common.errors import UnavailableError
from stagemesh.services.engines.base import Emission, Task
from stagemesh.services.engines.vllm.features import EngineRequest, RequestPrompt
from stagemesh.services.engines.vllm.requests import CheckedParams
from stagemesh.services.engines.vllm.rows.hidden_states import RunnerV1
from stagemesh.services.engines.vllm.rows.input_memory import StepRows
from stagemesh.services.engines.vllm.rows.row_receiver import EmittedRows
from stagemesh.services.engines.vllm.rows.row_writer import RequestedRows, Slice


def states_of(*, prompt_tokens: int, computed: int, end: int | None = None) -> EmittedRows:
    """Returns the states of a request whose first `computed` tokens the model has computed."""
    request = EngineRequest(Task("r", 0), "r/0", RequestPrompt([0] * prompt_tokens), CheckedParams())
    request.sampled += [0] * (computed + 1 - prompt_tokens)
    return EmittedRows(request, first_position=0, end_position=end)


def push(states: EmittedRows, position: int, count: int) -> None:
    states.push(position, {"hidden_states": np.arange(position, position + count, dtype=np.float32)[:, np.newaxis]})


async def test_rows_that_arrive_during_a_read_are_read_too() -> None:
    states = states_of(prompt_tokens=2, computed=4)
    push(states, 0, 2)
    taken: list[float] = []
    async for emission in states.finish():
        taken += emission.packet.tensors["hidden_states"][:, 0].tolist()
        if states.next_position == 2:
            push(states, 2, 2)
    assert taken == [0, 1, 2, 3]


async def test_rows_behind_the_end_are_not_awaited() -> None:
    states = states_of(prompt_tokens=2, computed=4, end=2)
    push(states, 0, 2)
    emissions = [emission async for emission in states.finish()]
    assert [len(emission.packet.tensors["hidden_states"]) for emission in emissions] == [2]


def test_a_worker_writes_only_the_requested_positions() -> None:
    worker = object.__new__(RunnerV1)
    worker._requested = {  # attach_replica, which needs an engine, creates it
        "all": RequestedRows("all", 0),
        "prompt": RequestedRows("prompt", 1, 6),
        "done": RequestedRows("done", 0, 4),
    }
    positions, starts = np.array([4, 0, 4, 4], np.int32), np.array([0, 3, 7, 10, 13], np.int32)
    rows = StepRows(["all", "prompt", "done", "other"], starts, positions)
    assert worker._slices(rows) == [Slice("all", 4, 0, 3), Slice("prompt", 1, 4, 3)]
    later = rows._replace(positions=np.array([7, 4, 7, 7], np.int32))
    assert worker._slices(later) == [Slice("all", 7, 0, 3), Slice("prompt", 4, 3, 2)]


async def test_repeated_rows_are_dropped_and_rows_past_the_end_stay() -> None:
    states = states_of(prompt_tokens=2, computed=4)
    push(states, 0, 3)
    push(states, 1, 4)
    first = [emission.packet async for emission in states.finish()]
    assert np.concatenate([packet.tensors["hidden_states"][:, 0] for packet in first]).tolist() == [0, 1, 2, 3]
    assert [emission.packet.metadata["token_start"] for emission in states.take(before=5)] == [4]


async def test_waiting_raises_the_error_of_the_worker() -> None:
    states = states_of(prompt_tokens=1, computed=1)

    async def first() -> Emission:
        return await anext(states.finish())

    waiting = asyncio.create_task(first())
    await asyncio.sleep(0)
    assert not waiting.done()
    states.fail(UnavailableError("the worker ended"))
    with pytest.raises(UnavailableError, match="the worker ended"):
        await waiting
