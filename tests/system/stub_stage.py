"""A server that is the external stage `upper`, made of generated stubs alone. It returns its text.

It makes one mistake for each request whose id begins with the name of a `RequestFault`, or one for all of them.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import Any, TypeAlias
from uuid import uuid4

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.rpc import error_details_pb2, status_pb2  # type: ignore[import-untyped]
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from stagemesh.pipeline import Pipeline
from stagemesh.v1 import chunk_pb2, request_pb2, signature_pb2, stage_pb2, tensor_pb2
from stagemesh.v1.protocol_pb2 import Protocol
from tests.connectors import minimum_profile

Event: TypeAlias = stage_pb2.ExecuteStepResponse
OTHER_PROTOCOL = Protocol(lowest_version=7, highest_version=9, software="stub 7")


class RequestFault(Enum):
    """A mistake in one request."""

    NONE = "fine"
    NO_CREDIT = "no_credit"
    NO_REPLIES = "no_replies"
    REJECTED_DIGEST = "rejected_digest"
    WRONG_DIGEST = "wrong_digest"
    NO_ACCEPTANCE = "no_acceptance"
    NO_END = "no_end"
    EXCEPTION = "exception"
    WRONG_KIND = "wrong_kind"
    UNAUTHENTICATED = "unauthenticated"


class ReplicaFault(Enum):
    """A mistake that affects all requests."""

    NONE = "none"
    SIGNATURE = "signature"
    VERSION = "version"
    NO_DESCRIPTION = "no_description"


def fault_of(request_id: str) -> RequestFault:
    name = request_id.partition(".")[0]
    return RequestFault(name) if name in {fault.value for fault in RequestFault} else RequestFault.NONE


class FaultyConsumer(minimum_profile.MinimumConsumer):
    """A consumer that makes the mistakes of a RequestFault."""

    def take(self, item: minimum_profile.Item) -> list[minimum_profile.Reply]:
        kind = item.WhichOneof("item")
        assert kind is not None
        key = getattr(item, kind).key
        match fault_of(key.request_id):
            case RequestFault.NO_REPLIES:
                return []
            case RequestFault.NO_CREDIT if kind == "open":
                (reply,) = super().take(item)
                reply.opened.credit_limit_bytes = 0
                return [reply]
            case RequestFault.NO_CREDIT if not item.chunk.HasField("abort"):
                return []
            case RequestFault.REJECTED_DIGEST if item.chunk.HasField("end"):
                error = chunk_pb2.Error(
                    code=grpc.StatusCode.INVALID_ARGUMENT.value[0],
                    reason="DIGEST_MISMATCH",
                    message=f"edge {key.edge} ended with another digest",
                    metadata={"edge": key.edge, "stage": "upper"},
                )
                self.flows[key.request_id].error = error
                self.flows[key.request_id].ended.set()
                return [minimum_profile.Reply(rejected=stage_pb2.EdgeRejected(key=key, error=error))]
            case _:
                return super().take(item)


class StubStage:
    """The stage's other methods."""

    def __init__(self, identity: minimum_profile.Identity, fault: ReplicaFault) -> None:
        self._identity, self._fault = identity, fault
        self.consumer = FaultyConsumer(identity)

    async def describe(self, request: stage_pb2.DescribeRequest, context: Any) -> stage_pb2.DescribeResponse:
        if self._fault is ReplicaFault.NO_DESCRIPTION:
            await asyncio.Event().wait()
        identity = self._identity
        text = tensor_pb2.TensorSpec(name="text", dtype=tensor_pb2.DATA_TYPE_UINT8, shape=["bytes"])
        differs = self._fault is ReplicaFault.SIGNATURE
        kind = signature_pb2.TENSOR_KIND_TENSOR if differs else signature_pb2.TENSOR_KIND_TEXT
        return stage_pb2.DescribeResponse(
            pipeline=identity.pipeline,
            generation=identity.generation,
            stage="upper",
            replica=identity.replica,
            incarnation=identity.incarnation,
            engine="stub",
            state=stage_pb2.REPLICA_STATE_READY,
            connectors=[chunk_pb2.CONNECTOR_GRPC],
            protocol=OTHER_PROTOCOL if self._fault is ReplicaFault.VERSION else identity.protocol,
            signature=signature_pb2.Signature(
                accepts=[signature_pb2.AcceptedTensor(spec=text)],
                emits=[signature_pb2.EmittedTensor(spec=text, kind=kind)],
            ),
        )

    async def execute_step(self, request: stage_pb2.ExecuteStepRequest, context: Any) -> AsyncIterator[Event]:
        fault = fault_of(request.request_id)
        if fault is RequestFault.NO_ACCEPTANCE:
            await asyncio.Event().wait()
        flow = self.consumer.flows.setdefault(request.request_id, minimum_profile.Received())
        yield Event(accepted=stage_pb2.StepAccepted())
        if fault is RequestFault.EXCEPTION:
            raise ArithmeticError("the stub divides by zero")
        if fault is RequestFault.UNAUTHENTICATED:
            await fail(context, chunk_pb2.Error(code=16, reason="UNAUTHENTICATED", message="who are you?"))
        if fault is RequestFault.WRONG_KIND:
            yield Event(output=request_pb2.Output(name="text", token_ids=request_pb2.TokenIds(ids=[1])))
        await flow.ended.wait()
        if flow.error is not None:
            await fail(context, flow.error)
        if fault is RequestFault.NO_END:
            await asyncio.Event().wait()
        try:
            await asyncio.gather(*(self._send(request, output, flow) for output in request.outputs))
        except minimum_profile.FlowRejectedError as exc:
            await fail(context, exc.error)
        except grpc.aio.AioRpcError as exc:
            await context.abort(exc.code(), exc.details(), tuple(exc.trailing_metadata()))
        text = b"".join(content for chunk in flow.chunks for content in chunk.contents).decode()
        yield Event(output=request_pb2.Output(name="text", text=text))
        finish = request_pb2.Finish(reason=request_pb2.FINISH_REASON_END)
        yield Event(output=request_pb2.Output(name="text", position=len(text.encode()), finish=finish))
        yield Event(finished=stage_pb2.StepFinished())

    async def _send(
        self, request: stage_pb2.ExecuteStepRequest, binding: stage_pb2.OutputBinding, flow: minimum_profile.Received
    ) -> None:
        key = chunk_pb2.EdgeKey(
            request_id=request.request_id, edge=binding.edge, attempt=binding.attempt or request.attempt
        )
        await minimum_profile.send_on(
            key,
            flow.chunks,
            identity=self._identity,
            endpoint=binding.endpoint,
            digest=bytes(32) if fault_of(request.request_id) is RequestFault.WRONG_DIGEST else None,
        )


async def fail(context: Any, error: chunk_pb2.Error) -> None:
    """Ends a call with an error."""
    detail = AnyMessage()
    detail.Pack(error_details_pb2.ErrorInfo(reason=error.reason, domain="stagemesh", metadata=error.metadata))
    status = status_pb2.Status(code=error.code, message=error.message, details=[detail])
    code = next(code for code in grpc.StatusCode if code.value[0] == error.code)
    await context.abort(code, error.message, (("grpc-status-details-bin", status.SerializeToString()),))


@asynccontextmanager
async def serving_stub(pipeline: Pipeline, listen: str, *, name: str, fault: ReplicaFault) -> AsyncGenerator[None]:
    """Serves a replica at an address within the block. Its connections break at the end."""
    identity = minimum_profile.Identity(name, uuid4().hex, pipeline.name, pipeline.generation, minimum_profile.PROTOCOL)
    stage = StubStage(identity, fault)
    server = grpc.aio.server(options=[*minimum_profile.LIMITS, ("grpc.http2.min_ping_interval_without_data_ms", 500)])
    describe = grpc.unary_unary_rpc_method_handler(
        stage.describe, stage_pb2.DescribeRequest.FromString, stage_pb2.DescribeResponse.SerializeToString
    )
    execute = grpc.unary_stream_rpc_method_handler(
        stage.execute_step, stage_pb2.ExecuteStepRequest.FromString, Event.SerializeToString
    )
    server.add_generic_rpc_handlers(
        (minimum_profile.stage_service(Describe=describe, ExecuteStep=execute, PutChunk=stage.consumer.handler()),)
    )
    healthy = health.aio.HealthServicer()
    await healthy.set("", health_pb2.HealthCheckResponse.SERVING)
    health_pb2_grpc.add_HealthServicer_to_server(healthy, server)
    server.add_insecure_port(listen)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)
