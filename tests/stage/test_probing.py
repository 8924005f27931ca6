"""ProbeEdge between two replicas."""

import grpc
import pytest

from stagemesh.common.errors import NotReadyError, StagemeshError, UnavailableError
from stagemesh.common.plugins import connectors
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import chunk_pb2, stage_pb2
from tests.stage.replicas import Replica, served_stage, stage_config


async def _probe(thinker: Replica, endpoint: str, **fields: int) -> stage_pb2.ProbeEdgeResponse:
    request = stage_pb2.ProbeEdgeRequest(edge="thinker->talker", consumer="talker-0", endpoint=endpoint, **fields)  # type: ignore[arg-type]
    return await thinker.stub.ProbeEdge(request, timeout=10)


async def _failure(thinker: Replica, endpoint: str, **fields: int) -> StagemeshError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await _probe(thinker, endpoint, **fields)
    return from_rpc_error(caught.value, peer="thinker")


async def test_a_probe_returns_the_connector_and_sends_nothing() -> None:
    async with served_stage() as thinker, served_stage(stage_config("talker", function="relay")) as talker:
        found = await _probe(thinker, talker.endpoint)
        assert (found.connector, len(found.refusals)) == (chunk_pb2.CONNECTOR_SHM, 0)
        assert thinker.runtime.load().arena_used_bytes == 0


async def test_a_fixed_connector_that_cannot_work_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connectors, "find_spec", lambda _: None)
    async with served_stage() as thinker, served_stage(stage_config("talker", function="relay")) as talker:
        error = await _failure(thinker, talker.endpoint, connector=chunk_pb2.CONNECTOR_NIXL)
    assert isinstance(error, NotReadyError)
    assert (error.reason, error.metadata["edge"]) == ("CONNECTOR_UNAVAILABLE", "thinker->talker")
    assert "set `connector: auto`" in error.message


async def test_an_unreachable_consumer_is_unavailable() -> None:
    async with served_stage() as thinker:
        assert isinstance(await _failure(thinker, "127.0.0.1:1"), UnavailableError)


async def test_an_unknown_connector_is_rejected() -> None:
    async with served_stage() as thinker:
        assert (await _failure(thinker, "127.0.0.1:1", connector=4711)).reason == "UNKNOWN_CONNECTOR"
