"""Calls to a replica whose answers cannot be read."""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import pytest

from stagemesh.common.errors import InternalError, StagemeshError
from stagemesh.connectors.packets import ConsumerAddress
from stagemesh.orchestrator.fleet.replica_client import ReplicaClient
from stagemesh.v1 import control_pb2, stage_pb2

MALFORMED = b"\xff\xff"
MANY = b"\x0a\0" * (4 << 20)
"""The first field, four million times."""
TOO_LARGE = bytes(9 << 20)
BUSY_S = 0.5


class _HostileReplica(grpc.GenericRpcHandler):
    """Answers every RPC with bytes that cannot be parsed, or with an error whose details cannot be parsed."""

    def __init__(self, answer: bytes, *, fails: bool) -> None:
        self._answer, self._fails = answer, fails

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Any:
        async def answer(_requests: Any, context: Any) -> AsyncGenerator[bytes]:
            if self._fails:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "no", (("grpc-status-details-bin", MALFORMED),))
            yield self._answer

        make: Any = grpc.stream_stream_rpc_method_handler
        return make(answer)


@asynccontextmanager
async def _client(answer: bytes = MALFORMED, *, fails: bool = False) -> AsyncGenerator[ReplicaClient]:
    size: Any = [("grpc.max_send_message_length", -1)]
    server = grpc.aio.server(handlers=[_HostileReplica(answer, fails=fails)], options=size)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    client = ReplicaClient(stage="a", replica="a-0", endpoint=f"127.0.0.1:{port}")
    try:
        yield client
    finally:
        await client.close()
        await server.stop(None)


async def _watch_load(client: ReplicaClient) -> None:
    async with aclosing(client.watch_load(stage_pb2.ROLLOUT_VERDICT_UNSPECIFIED)) as reports:
        async for _ in reports:
            pass


async def _probe(client: ReplicaClient) -> None:
    await client.probe_edge("a->b", ConsumerAddress("b-0", "127.0.0.1:1", ""), "auto", timeout_s=5)


CALLS: dict[str, Callable[[ReplicaClient], Awaitable[object]]] = {
    "describe": lambda client: client.describe(timeout_s=5),
    "health": lambda client: client.wait_while_serving(),
    "load": _watch_load,
    "probe": _probe,
    "rebind": lambda client: client.rebind(stage_pb2.RebindStepRequest(), timeout_s=5),
    "cancel": lambda client: client.cancel(stage_pb2.CancelStepRequest(), timeout_s=5),
    "control": lambda client: client.control(control_pb2.WakeRequest(), control_pb2.WakeResponse, timeout_s=5),
    "step": lambda client: client.execute(stage_pb2.ExecuteStepRequest(), timeout_s=5, take=print),
}


@pytest.mark.parametrize("call", sorted(CALLS.keys() - {"rebind", "health"}))
async def test_an_answer_that_cannot_be_read_is_an_error(call: str) -> None:
    causes = {MALFORMED: "is damaged, or a string", MANY: "more than 131,072 values", TOO_LARGE: "larger than max"}
    for answer, cause in causes.items():
        async with _client(answer) as client:
            began_s = time.thread_time()
            with pytest.raises(InternalError, match=rf"stage 'a' \(replica a-0 .*{cause}"):
                await CALLS[call](client)
            assert time.thread_time() - began_s < BUSY_S


async def test_a_health_that_cannot_be_read_is_an_error() -> None:
    async with _client() as client:
        with pytest.raises(StagemeshError, match=r"stage 'a' \(replica a-0"):
            await client.wait_while_serving()


async def test_a_string_of_a_replica_that_is_not_utf8_is_an_error() -> None:
    async with _client(b"\x0a\x01\xff") as client:
        with pytest.raises(InternalError, match=r"stage 'a' .* not a valid DescribeResponse: .* not UTF-8"):
            await client.describe(timeout_s=5)


@pytest.mark.parametrize("call", CALLS)
async def test_an_error_with_malformed_details_has_its_code(call: str) -> None:
    async with _client(fails=True) as client:
        with pytest.raises(StagemeshError, match="no"):
            await CALLS[call](client)
