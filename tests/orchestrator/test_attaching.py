import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from stagemesh.connectors.errors import ExistsError
from stagemesh.orchestrator.record import RequestRecord
from stagemesh.v1 import orchestrator_pb2, request_pb2
from tests.orchestrator.mesh import Mesh, ask, mesh, texts
from tests.orchestrator.scripted_stage import hang

if TYPE_CHECKING:
    import grpc


async def test_a_second_call_hears_the_same_request_from_its_start(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        first = await chain.generate(request_id="r1")
        second = await chain.generate(request_id="r1")
        assert len(chain.stages["a"].requests) == 1
    assert first == second


async def test_one_id_with_other_content_is_refused(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        await chain.generate(request_id="r1")
        error = await chain.failure(request_id="r1", outputs=["last"])
    assert isinstance(error, ExistsError)
    assert error.reason == "REQUEST_EXISTS"


async def test_a_caller_goes_on_where_it_left_off(tmp_path: Path) -> None:
    async with mesh(tmp_path) as chain:
        await chain.generate(request_id="r1")
        again = ask(request_id="r1")
        again.next_seqs["first"] = 1
        events = [event async for event in chain.stub.Generate(again)]
    assert (texts(events, "first"), texts(events, "last")) == ("done", "c done")


async def test_a_request_runs_on_until_its_last_caller_goes(tmp_path: Path) -> None:
    async with mesh(tmp_path, scripts={"a": hang, "b": hang, "c": hang}) as chain:
        calls = [await _joined(chain), await _joined(chain)]
        calls[0].cancel()
        assert (await chain.describe()).in_flight == 1
        calls[1].cancel()
        async with asyncio.timeout(1):
            await chain.until_idle()


async def _joined(
    chain: Mesh,
) -> "grpc.aio.UnaryStreamCall[orchestrator_pb2.GenerateRequest, orchestrator_pb2.GenerateResponse]":
    """A call that has begun to hear the request."""
    call = chain.stub.Generate(ask(request_id="r1"))
    async for event in call:
        if event.HasField("output"):
            break
    return call


async def test_a_record_keeps_order_for_late_readers() -> None:
    record = RequestRecord()
    record.add_admitted(request_id="r1", seed=1, replicas={})
    for text in ("one", "two"):
        record.add_output("text", request_pb2.Output(name="t", seq=9, text=text))
    record.finish()
    events = [event async for event in record.follow(next_seqs={})]
    assert [(event.output.name, event.output.seq) for event in events[1:3]] == [("text", 0), ("text", 1)]
