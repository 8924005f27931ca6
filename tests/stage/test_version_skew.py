"""Orchestrators of a later version of the contract call a stage of today."""

from typing import Any

import grpc
import pytest

from stagemesh.v1 import stage_pb2
from stagemesh.v1.protocol_pb2 import Protocol
from tests.later_contract import later, later_class, today
from tests.stage.replicas import served_stage, stage_config, step_request
from tests.stage.test_execute_steps import Caller


def _action(call: int, *, ignorable: bool = False) -> stage_pb2.ExecuteStepsRequest:
    later_action = later_class("ExecuteStepsRequest")(call=call, later="pause", ignorable=ignorable)
    request: stage_pb2.ExecuteStepsRequest = today(later_action, stage_pb2.ExecuteStepsRequest)
    return request


async def test_a_stage_ignores_added_fields_and_ignorable_actions() -> None:
    async with served_stage(stage_config(steps=2)) as replica:
        caller = Caller(replica)
        request: Any = today(later(step_request("r")), stage_pb2.ExecuteStepRequest)
        await caller.begin(1, request)
        await caller.call.write(_action(1, ignorable=True))
        await caller.until_ended(1)
    assert not caller.received[1][-1].ended.HasField("error")


async def test_a_stage_refuses_an_unknown_action_of_one_call_only() -> None:
    async with served_stage(stage_config(steps=2)) as replica:
        caller = Caller(replica)
        await caller.call.write(_action(1))
        await caller.begin(2, step_request("r"))
        await caller.until_ended(1, 2)
    error = caller.received[1][-1].ended.error
    assert (error.code, error.reason) == (grpc.StatusCode.UNIMPLEMENTED.value[0], "UNKNOWN_KIND")
    assert "sent a ExecuteStepsRequest of an unknown kind (field 1000)" in error.message
    assert not caller.received[2][-1].ended.HasField("error")


async def test_a_stage_refuses_an_unknown_chunk_policy() -> None:
    async with served_stage(stage_config(steps=2)) as replica:
        binding = later_class("OutputBinding")(edge="a->b", consumer="b-0", endpoint="127.0.0.1:1", attempt=1)
        binding.policy.later = "pages"
        request = step_request("r")
        request.outputs.append(today(binding, stage_pb2.OutputBinding))
        caller = Caller(replica)
        await caller.begin(1, request)
        await caller.until_ended(1)
    assert "sent a ChunkPolicy of an unknown kind (field 1000)" in caller.received[1][-1].ended.error.message


async def test_a_stage_refuses_an_orchestrator_without_a_common_version() -> None:
    async with served_stage() as replica:
        request = stage_pb2.DescribeRequest(protocol=Protocol(lowest_version=2, highest_version=4))
        with pytest.raises(grpc.aio.AioRpcError, match=r"2 to 4, but replica thinker-0 speaks .* 1 to 1") as caught:
            await replica.stub.Describe(request, timeout=5)
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
