"""The stage as a consumer: Hello, which flows are accepted, and how they end. Test vectors have most cases."""

import asyncio
from collections.abc import Callable
from typing import Any

from stagemesh.common.errors import Code
from stagemesh.stage_conformance.cases import RECOVERY, Needs, case, expect, expect_equal
from stagemesh.stage_conformance.content import OWN_REASON
from stagemesh.stage_conformance.played_producer import Flow, Stream
from stagemesh.stage_conformance.suites.steps import running
from stagemesh.stage_conformance.trial import Step, Trial
from stagemesh.v1 import chunk_pb2, stage_pb2
from stagemesh.v1.protocol_pb2 import Protocol

INPUT = Needs.INPUT
_LARGE_WINDOW_BYTES = 64 << 20
TABLE = "The consumer: the table of items"
_HELLO = "A flow: Hello and Welcome (checklist 5)"
_CREDIT = "Credit (checklist 13)"
_KINDS = "Versions and unknown kinds (checklist 22)"


async def started(trial: Trial, *, attempt: int = 1) -> tuple[Step, Stream, Flow]:
    """Starts a step, and opens its incoming flow."""
    step, _ = await trial.start(attempt=attempt)
    stream = await trial.stream()
    return step, stream, await stream.open(trial.key_in(attempt))


async def complete(step: Step, flow: Flow, *, chunks: int = 2) -> None:
    """Sends further chunks and the end of a flow, and waits for the end of the step."""
    await more(flow, chunks)
    await flow.end()
    await flow.committed()
    await step.finished()


async def more(flow: Flow, chunks: int = 1) -> None:
    """Sends further chunks of 4 rows."""
    for _ in range(chunks):
        await flow.send(flow.stream.inputs.chunk(len(flow.sent), 4))
    await flow.acknowledged(len(flow.sent))


# -- Hello and Welcome


@case("consumer.welcome", _HELLO, INPUT)
async def welcome(trial: Trial) -> None:
    stream = await trial.stream()
    found, described = stream.welcome, trial.stage.described
    assert found is not None
    expect_equal("the replica", described.replica, found.replica)
    expect_equal("the incarnation", described.incarnation, found.incarnation)
    expect(
        found.protocol.lowest_version <= 1 <= found.protocol.highest_version,
        "a protocol with version 1",
        found.protocol,
    )
    expect(found.protocol.lowest_version >= 1, "a lowest version of at least 1", found.protocol)
    expect(not found.held_lease_ids, "no leases", list(found.held_lease_ids))


_REFUSED_HELLO: dict[str, tuple[dict[str, Any], Code, str]] = {
    "pipeline": ({"pipeline": "conformance.none"}, Code.FAILED_PRECONDITION, "WRONG_PIPELINE"),
    "generation": ({"generation": "conformance.none"}, Code.FAILED_PRECONDITION, "WRONG_GENERATION"),
    "no-replica": ({"replica": ""}, Code.INVALID_ARGUMENT, "NO_HELLO"),
    "no-incarnation": ({"incarnation": ""}, Code.INVALID_ARGUMENT, "NO_HELLO"),
    "no-protocol": ({"protocol": None}, Code.FAILED_PRECONDITION, "NO_COMMON_VERSION"),
    "later-protocol": (
        {"protocol": Protocol(lowest_version=8, highest_version=9)},
        Code.FAILED_PRECONDITION,
        "NO_COMMON_VERSION",
    ),
}


@case("consumer.refuses-hello", _HELLO, INPUT, variants=_REFUSED_HELLO)
async def refuses_hello(trial: Trial, variant: tuple[dict[str, Any], Code, str]) -> None:
    changes, code, reason = variant
    producer = trial.producer()
    stream = await producer.raw_stream()
    await stream.put(hello=producer.hello(**changes))
    await stream.refused(code, reason)
    expect(stream.welcome is None, "no Welcome", stream.came)


@case("consumer.no-hello-first", _HELLO, INPUT)
async def no_hello_first(trial: Trial) -> None:
    stream = await trial.producer().raw_stream()
    key = trial.key_in()
    await stream.put(stage_pb2.PutItem(open=stage_pb2.OpenEdge(key=key, connector=chunk_pb2.CONNECTOR_GRPC, opening=1)))
    await stream.refused(Code.INVALID_ARGUMENT, "NO_HELLO")


@case("consumer.no-hello", "Time limits: Hello within 10 s of the start of a stream", INPUT, waits_s=10)
async def no_hello(trial: Trial) -> None:
    stream = await trial.producer().raw_stream()
    # Without a message, gRPC may not even start the call.
    await asyncio.sleep(0)
    await stream.until(lambda: stream.ended, "the end of a stream without Hello", within_s=13.0)


@case("consumer.hello-features", f"{_HELLO}: ignore features that you do not know", INPUT)
async def hello_features(trial: Trial) -> None:
    producer = trial.producer()
    stream = await producer.raw_stream()
    protocol = Protocol(lowest_version=1, highest_version=5, features=["x" * 100, "offers"], max_message_bytes=8 << 20)
    await stream.put(hello=producer.hello(protocol=protocol))
    await stream.until(lambda: stream.welcome, "`welcome`")


# -- which flows are accepted


def open_item(key: chunk_pb2.EdgeKey) -> stage_pb2.PutItem:
    return stage_pb2.PutItem(open=stage_pb2.OpenEdge(key=key, connector=chunk_pb2.CONNECTOR_GRPC, opening=1))


_ITEMS: dict[str, Callable[[chunk_pb2.EdgeKey], stage_pb2.PutItem]] = {
    "open": open_item,
    "chunk": lambda key: stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=key, data=chunk_pb2.ChunkData())),
    "fragment": lambda key: stage_pb2.PutItem(fragment=chunk_pb2.ChunkFragment(key=key, total_bytes=1, payload=b"x")),
    "demand": lambda key: stage_pb2.PutItem(demand=stage_pb2.CreditDemand(key=key, size_bytes=1)),
}


@case("consumer.unknown-flow", f"{TABLE}: of an unknown flow", INPUT, variants=_ITEMS)
async def unknown_flow(trial: Trial, item: Callable[[chunk_pb2.EdgeKey], stage_pb2.PutItem]) -> None:
    stream = await trial.stream()
    flow = stream.flow(trial.key_in())
    await stream.put(item(flow.key))
    error = await flow.rejected(Code.NOT_FOUND, "UNKNOWN_FLOW")
    expect_equal("the metadata `edge`", trial.edge_in, error.metadata.get("edge"))


_KEYS: dict[str, tuple[dict[str, Any], Code, str]] = {
    "unknown-edge": ({"edge": "conformance.none->x"}, Code.NOT_FOUND, "UNKNOWN_FLOW"),
    "unknown-request": ({"request_id": "conformance.none"}, Code.NOT_FOUND, "UNKNOWN_FLOW"),
    "lower-attempt": ({"attempt": 2}, Code.FAILED_PRECONDITION, "STALE_ATTEMPT"),
    "higher-attempt": ({"attempt": 4}, Code.NOT_FOUND, "UNKNOWN_FLOW"),
}


@case("consumer.refuses-open", f"{TABLE}: of an unknown flow, STALE_ATTEMPT", INPUT, variants=_KEYS)
async def refuses_open(trial: Trial, variant: tuple[dict[str, Any], Code, str]) -> None:
    changes, code, reason = variant
    step, stream, flow = await started(trial, attempt=3)
    expected: dict[str, Any] = {"request_id": trial.request_id, "edge": trial.edge_in, "attempt": 3}
    other = stream.flow(chunk_pb2.EdgeKey(**{**expected, **changes}))
    await other.ask_open()
    await other.rejected(code, reason)
    await complete(step, flow)


async def _refuses_stranger(trial: Trial) -> None:
    """Opens the flow of the trial as another replica."""
    producer = trial.producer()
    producer.name += ".other"
    stranger = (await producer.stream()).flow(trial.key_in())
    await stranger.ask_open()
    await stranger.rejected(Code.NOT_FOUND, "UNKNOWN_FLOW")


@case("consumer.other-replica", f"{TABLE}: from another replica", INPUT)
async def other_replica(trial: Trial) -> None:
    step, _, flow = await started(trial)
    await _refuses_stranger(trial)
    await complete(step, flow)


@case("consumer.other-incarnation", f"{TABLE}: STALE_INCARNATION; Hello of another incarnation", INPUT)
async def other_incarnation(trial: Trial) -> None:
    _, _, flow = await started(trial)
    await more(flow)
    again = (await trial.stream(incarnation="second")).flow(trial.key_in())
    await again.ask_open()
    await again.rejected(None, "STALE_INCARNATION", "PEER_LOST")


@case("consumer.committed-to-another", f"{TABLE}: committed, of another replica", INPUT)
async def committed_to_another(trial: Trial) -> None:
    step, _, flow = await started(trial)
    await complete(step, flow)
    await _refuses_stranger(trial)


# -- ends


@case("consumer.abort-reason", "The consumer: `abort`; Errors: an error keeps its reason and `stage`", INPUT)
async def abort_reason(trial: Trial) -> None:
    step, peer, flow = await running(trial)
    assert flow is not None
    error = chunk_pb2.Error(
        code=Code.INVALID_ARGUMENT, reason=OWN_REASON, message="played", metadata={"stage": "upstream"}
    )
    await flow.abort(error)
    failed = await step.failed(Code.INVALID_ARGUMENT, OWN_REASON)
    stage = "the metadata `stage`, in which the error occurred first"
    expect_equal(stage, "upstream", failed.metadata.get("stage"))
    if peer is not None:
        passed_on = (await peer.arrived(lambda each: each.abort, "`abort` of the outgoing flow")).abort
        assert passed_on is not None
        expect_equal("the reason of `abort`", OWN_REASON, passed_on.reason)
        expect_equal(stage, "upstream", passed_on.metadata.get("stage"))


LARGE_ERROR = "Errors: an error arrives whatever the size of its metadata"


def large_error() -> chunk_pb2.Error:
    """Returns an error whose metadata does not fit into the trailers of a call."""
    metadata = {"stage": "elsewhere", **{f"value-{number}": "x" * 1000 for number in range(100)}}
    return chunk_pb2.Error(code=Code.INVALID_ARGUMENT, reason=OWN_REASON, message="m" * 100_000, metadata=metadata)


async def expect_cause(step: Step) -> None:
    """Waits until a step has failed with the error of `large_error`."""
    failed = await step.failed(Code.INVALID_ARGUMENT, OWN_REASON)
    expect_equal("the metadata `stage`", "elsewhere", failed.metadata.get("stage"))


@case("consumer.abort-large-error", f"{LARGE_ERROR}, also one of `abort`", INPUT)
async def abort_large_error(trial: Trial) -> None:
    step, _, flow = await started(trial)
    await flow.abort(large_error())
    await expect_cause(step)


@case("consumer.not-read", "The consumer: a step that fails for good rejects its flows (NOT_READ)", INPUT, Needs.OUTPUT)
async def not_read(trial: Trial) -> None:
    step, peer, flow = await running(trial)
    assert peer is not None
    assert flow is not None
    outgoing = await peer.arrived(lambda each: each.openings, "`open` of the outgoing flow")
    error = chunk_pb2.Error(code=Code.INVALID_ARGUMENT, reason=OWN_REASON, message="played")
    await peer.connections[-1].reply(stage_pb2.PutReply(rejected=stage_pb2.EdgeRejected(key=outgoing.key, error=error)))
    # An engine that waits for input may notice the rejection when it sends the result.
    await flow.send(trial.inputs.chunk(1, 4))
    await flow.rejected(Code.CANCELLED, "NOT_READ")
    await step.failed(Code.INVALID_ARGUMENT, OWN_REASON)


@case("consumer.chunk-after-end", f"{TABLE}: a flow that was committed", INPUT)
async def chunk_after_end(trial: Trial) -> None:
    step, stream, flow = await started(trial)
    await complete(step, flow)
    await flow.send(trial.inputs.chunk(2, 4), 3)
    await stream.until(lambda: len(flow.all("commit")) >= 2 or flow.all("rejected"), "`commit` again")
    expect(not flow.all("rejected"), "`commit` again", stream.came)


@case(
    "consumer.abort-of-lost-peer",
    "The consumer: wait 15 s for RebindStep if another producer may take over",
    INPUT,
    level=RECOVERY,
)
async def abort_of_lost_peer(trial: Trial) -> None:
    await trial.require_rebinding()
    step, _, flow = await started(trial)
    error = chunk_pb2.Error(code=Code.UNAVAILABLE, reason="PEER_LOST", message="played")
    await flow.abort(error)
    await flow.acknowledged(1)
    await asyncio.sleep(2.0)
    expect(not step.is_over, "a step that waits for RebindStep", step.came)
