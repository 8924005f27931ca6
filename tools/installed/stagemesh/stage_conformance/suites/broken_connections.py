"""The connections of the stage to its consumers: they break, are refused, or cannot be made."""

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import grpc
from google.protobuf.any import pack
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_status import rpc_status

from stagemesh.common.errors import Code, NotReadyError, StagemeshError, UnavailableError, UnsupportedError
from stagemesh.stage_conformance.cases import FURTHER, case, expect
from stagemesh.stage_conformance.played_consumer import Consumer, Ending
from stagemesh.stage_conformance.suites.producer import HELLO, OUTPUT, delivered, sending
from stagemesh.stage_conformance.trial import Step, Trial
from stagemesh.v1 import stage_pb2

_BROKEN = "Broken connections (checklist 24)"
_STATUSES = {code.name: code for code in grpc.StatusCode if code is not grpc.StatusCode.UNIMPLEMENTED}


@case(
    "producer.stream-ends", f"{_BROKEN}: a status without ErrorInfo is a broken connection", OUTPUT, variants=_STATUSES
)
async def stream_ends(trial: Trial, status: grpc.StatusCode) -> None:
    await _breaking(trial, status)


async def _breaking(trial: Trial, status: Ending) -> None:
    """Ends the first stream after a chunk. Nothing may be lost or doubled."""

    def answer(consumer: Consumer, item: stage_pb2.PutItem) -> Any:
        connection = consumer.connection
        assert connection is not None
        if item.HasField("chunk") and connection is consumer.connections[0]:
            if not connection.ending.done():
                consumer.take(item)
                connection.end(status)
            return []
        return None

    step, consumer = await sending(trial, answer=answer)
    await delivered(trial, step, consumer)
    expect(len(consumer.connections) >= 2, "a second stream", consumer.came)
    sent_again = [seq for seq in consumer.only().arrivals if consumer.only().arrivals.count(seq) > 1]
    expect(0 not in sent_again, "chunks from next_seq 1 on", consumer.only().arrivals)


@case("producer.stream-unavailable", f"{_BROKEN}: UNAVAILABLE with an ErrorInfo is a broken connection, too", OUTPUT)
async def stream_unavailable(trial: Trial) -> None:
    await _breaking(trial, UnavailableError("played", reason="CONNECTION_LOST"))


@case("producer.stream-foreign-error", f"{_BROKEN}: so is an ErrorInfo of another domain", OUTPUT)
async def stream_foreign_error(trial: Trial) -> None:
    info = error_details_pb2.ErrorInfo(reason="WRONG_PIPELINE", domain="conformance.example")
    status = status_pb2.Status(code=Code.FAILED_PRECONDITION, message="played", details=[pack(info)])
    await _breaking(trial, rpc_status.to_status(status))


async def _waiting(trial: Trial, consumer: Consumer) -> Step:
    """Starts a step with its whole input, and waits for Hello, which the consumer does not answer."""
    step = await trial.call(trial.request(consumer)).accepted()
    await trial.supply()
    await consumer.until(lambda: consumer.connections and consumer.connections[0].hello, "Hello")
    return step


_REFUSALS: Mapping[str, tuple[StagemeshError | grpc.StatusCode, Code]] = {
    "wrong-pipeline": (NotReadyError("played", reason="WRONG_PIPELINE"), Code.FAILED_PRECONDITION),
    "unsupported": (UnsupportedError("played", reason="UNKNOWN_KIND"), Code.UNIMPLEMENTED),
}


@case(
    "producer.stream-refused", f"{_BROKEN}: a refusal of the stream fails its flows at once", OUTPUT, variants=_REFUSALS
)
async def stream_refused(trial: Trial, variant: tuple[StagemeshError, Code]) -> None:
    error, code = variant
    consumer = await trial.consumer(welcomes=False)
    step = await _waiting(trial, consumer)
    consumer.connections[0].end(error)
    await step.failed(code, error.reason)


@case("producer.stream-unimplemented", f"{_BROKEN}: UNIMPLEMENTED fails the flows at once", OUTPUT)
async def stream_unimplemented(trial: Trial) -> None:
    consumer = await trial.consumer(welcomes=False)
    step = await _waiting(trial, consumer)
    consumer.connections[0].end(grpc.StatusCode.UNIMPLEMENTED)
    await step.until(lambda: step.is_over, "the step fails")
    expect(step.error is not None, "an error", step.came)


@case("producer.consumer-restarts", f"{HELLO}: another incarnation in Welcome fails the flows (PEER_LOST)", OUTPUT)
async def consumer_restarts(trial: Trial) -> None:
    step, consumer = await sending(trial, raises=False, limit_bytes=1 << 30, limit_chunks=1)
    await consumer.arrived(lambda each: each.chunks, "a chunk")
    consumer.incarnation = f"{consumer.name}/2"
    openings = len(consumer.only().openings)
    consumer.connections[0].end(grpc.StatusCode.UNAVAILABLE)
    await consumer.until(lambda: len(consumer.connections) >= 2, "a second stream")
    await asyncio.sleep(1.0)
    expect(len(consumer.only().openings) == openings, "no `open` at another incarnation", consumer.came)
    expect("finished" not in step.kinds(), "a step that does not finish", step.came)


@case(
    "producer.nobody-listens",
    "Time limits: an unreachable consumer is dead after 15 s, or 0.5 s",
    OUTPUT,
    level=FURTHER,
    waits_s=16,
)
async def refused_connection(trial: Trial) -> None:
    consumer = trial.silent_consumer()
    # No other process can use a port that is bound, although nothing listens.
    with socket.socket() as silent:
        silent.bind(("", 0))
        consumer.endpoint = f"{trial.stage.host}:{silent.getsockname()[1]}"
        step = await trial.call(trial.request(consumer)).accepted()
        await trial.supply()
        # 15 s until it counts as dead, and 15 s for RebindStep.
        await step.failed(Code.UNAVAILABLE, within_s=35)
