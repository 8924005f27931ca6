"""Replicas with certificates: the readers of a flow, and the speakers on the local socket."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from stagemesh.common.plugins.connectors import SHM
from stagemesh.conformance import Host, assert_same, exchange, open_flow, packet
from stagemesh.rpc.callers import OPERATOR, ORCHESTRATOR, STAGE
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.handlers import add_stage_service
from stagemesh.rpc.server import Server
from stagemesh.v1 import stage_pb2, stage_pb2_grpc
from tests.connectors.handmade_producers import WIRE_KEY, hello
from tests.connectors.hosts import started_host
from tests.connectors.local_sockets import connect
from tests.credentials import issue, process_credentials
from tests.rpc.call_errors import error_of


@asynccontextmanager
async def _certified(name: str) -> AsyncGenerator[Host]:
    """Yields a host whose address serves TLS."""
    async with started_host(name) as host:
        server = Server("127.0.0.1:0", roles={STAGE, ORCHESTRATOR, OPERATOR})
        add_stage_service(host, server.grpc)
        async with server.serving(grace_s=0) as port:
            host.endpoint = f"127.0.0.1:{port}"
            yield host


@asynccontextmanager
async def _hosts(folder: Path) -> AsyncGenerator[tuple[Host, Host]]:
    """Yields the producer "a-0" and the consumer "b-0". The process has the certificates of both."""
    with process_credentials(issue(folder, "stage/a/a-0", "stage/b/b-0")):
        async with _certified("a-0") as a, _certified("b-0") as b:
            yield a, b


async def _read(host: Host, folder: Path) -> stage_pb2.GetChunkResponse:
    """Returns the first message of the flow, read with the certificate in a folder."""
    with process_credentials(folder):
        channel = open_channel(host.endpoint)
    async with channel:
        request = stage_pb2.GetChunkRequest(key=WIRE_KEY)
        return await anext(aiter(stage_pb2_grpc.StageServiceStub(channel).GetChunk(request, timeout=10)))


@pytest.mark.parametrize("name", ["stage/b/b-0", "stage/b/b-*", "orchestrator/main", "operator/alice"])
async def test_a_flow_is_read_by_its_consumer(tmp_path: Path, name: str) -> None:
    async with _hosts(tmp_path) as (a, b):
        outlet, inlet = open_flow(a, b)
        await outlet.send(packet(0, 10))
        assert (await _read(a, issue(tmp_path, name))).chunk.seq == 0
        await inlet.aclose()


@pytest.mark.parametrize("name", ["stage/b/b-1", "stage/a/a-0", "stage/c/*-*-*", "client/alice"])
async def test_a_flow_is_read_by_no_other_caller(tmp_path: Path, name: str) -> None:
    async with _hosts(tmp_path) as (a, b):
        outlet, inlet = open_flow(a, b)
        await outlet.send(packet(0, 10))
        error = await error_of(_read(a, issue(tmp_path, name)))
        assert error.reason == ("WRONG_ROLE" if name.startswith("client") else "REPLICA_MISMATCH")
        await inlet.aclose()


async def test_replicas_with_certificates_share_memory(tmp_path: Path) -> None:
    sent = [packet(seq, 100_000) for seq in range(5)]
    async with _hosts(tmp_path) as (a, b):
        outlet, inlet = open_flow(a, b, connector=SHM)
        assert_same(await exchange(outlet, inlet, sent), sent)
        assert outlet.attempt.connector == SHM


_LIES: dict[str, dict[str, Any]] = {
    "no secret": {},
    "another secret": {"local_secret": bytes(16)},
    "another incarnation": {"incarnation": "new"},
    "another replica": {"replica": "c-0", "incarnation": "new"},
}


@pytest.mark.parametrize("lie", _LIES.values(), ids=_LIES)
async def test_a_process_of_the_same_user_does_not_speak_as_a_replica(tmp_path: Path, lie: dict[str, Any]) -> None:
    async with _hosts(tmp_path) as (a, b), asyncio.timeout(20):
        outlet, inlet = open_flow(a, b)
        await outlet.send(packet(0, 10))
        await anext(inlet)
        # /proc/net/unix shows the name to every process of the network namespace.
        with connect(b.plane._listener.name) as forger:
            forger.raw.setblocking(True)
            forger.raw.sendall(b"\0")
            forger.raw.setblocking(False)
            await forger.write_frame(hello(**{"incarnation": a.plane.incarnation, **lie}).SerializeToString())
            assert [frame async for frame in forger.frames()] == []
        finishing = asyncio.create_task(outlet.finish())
        assert await anext(inlet, None) is None
        await finishing
        await inlet.aclose()
