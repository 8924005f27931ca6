"""The gRPC servicer of OrchestratorService. Converts messages and calls the orchestrator.

`converse` serves the call of a session: it reads the client's events, and writes those of the session.
"""

import asyncio
from contextlib import aclosing
from typing import Any

import grpc

from stagemesh.common.errors import NotReadyError
from stagemesh.common.tasks import end_tasks
from stagemesh.common.wire.versions import check_version
from stagemesh.orchestrator.config import OrchestratorConfig
from stagemesh.orchestrator.descriptions import describe_pipeline
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.validation import check_pipeline
from stagemesh.orchestrator.session.answer_relay import SessionCall
from stagemesh.orchestrator.session.registry import SessionRegistry
from stagemesh.orchestrator.session.session import Session
from stagemesh.orchestrator.spans import read_trace_headers
from stagemesh.rpc.call_limits import Messages
from stagemesh.rpc.callers import caller_of, may_act_for
from stagemesh.rpc.handlers import Context, answered, time_left_s, to_error
from stagemesh.v1 import orchestrator_pb2, orchestrator_pb2_grpc

SERVICE_NAME = orchestrator_pb2.DESCRIPTOR.services_by_name["OrchestratorService"].full_name


async def converse(sessions: SessionRegistry, events: Messages, context: Context) -> None:
    """Serves a call of Converse until it ends. Raises the error with which it ends. `events` come from the client.

    Responses are written in serialized form, because there are many of them.
    """
    opening = await anext(events, None)
    if opening is None or not opening.HasField("open"):
        raise NotReadyError("the first event must open the session; send `open` first", reason="SESSION_NOT_OPEN")
    opening.open.caller = caller_of(claimed=opening.open.caller)
    session, call = await sessions.open(opening.open)
    reading = asyncio.create_task(_read_events(session, call, events), name="read events of a session")
    try:
        async with aclosing(call.events()) as answers:
            async for answer in answers:
                await context.write(answer)
    finally:
        sessions.leave(session, call)
        await end_tasks([reading])


async def _read_events(session: Session, call: SessionCall, events: Messages) -> None:
    try:
        async for event in events:
            if not session.handle(call, event):
                events.reject()
            await call.wait_for_space()
    except Exception as exc:  # noqa: BLE001
        call.end(to_error(exc, {}))
    else:
        session.end_input(call)


@answered
class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Implements OrchestratorService for the clients of one orchestrator."""

    def __init__(self, orchestrator: Orchestrator, config: OrchestratorConfig) -> None:
        """`config` has the addresses of the pipeline's other services for clients."""
        self._orchestrator, self._config = orchestrator, config

    async def Generate(  # type: ignore[override]
        self, request: orchestrator_pb2.GenerateRequest, context: Context
    ) -> None:
        # Responses are written in serialized form (`add_orchestrator_service`), because there are many of them.
        read_trace_headers(context.invocation_metadata())
        request.caller = caller_of(claimed=request.caller)
        events = await self._orchestrator.generate(request, time_left_s=time_left_s(context))
        async with aclosing(events):
            async for event in events:
                await context.write(event)

    async def Converse(self, requests: Messages, context: Context) -> None:  # type: ignore[override]
        read_trace_headers(context.invocation_metadata())
        await converse(self._orchestrator.sessions, requests, context)

    async def CancelRequest(
        self, request: orchestrator_pb2.CancelRequestRequest, context: Context
    ) -> orchestrator_pb2.CancelRequestResponse:
        await self._orchestrator.cancel(request.request_id, when_left=request.when_left, may_act_for=may_act_for)
        return orchestrator_pb2.CancelRequestResponse()

    async def DescribePipeline(
        self, request: orchestrator_pb2.DescribePipelineRequest, context: Context
    ) -> orchestrator_pb2.DescribePipelineResponse:
        if request.HasField("protocol"):
            check_version(request.protocol, peer="the client", own_name="this orchestrator")
        check_pipeline(request.pipeline, self._orchestrator.pipeline)
        return describe_pipeline(self._orchestrator, self._config, caller=caller_of(claimed=""))


def add_orchestrator_service(servicer: OrchestratorServicer, server: grpc.aio.Server) -> None:
    """Registers `servicer` with a gRPC server. Generate and Converse write serialized responses."""
    orchestrator_pb2_grpc.add_OrchestratorServiceServicer_to_server(servicer, server)
    by_stream: Any = grpc.unary_stream_rpc_method_handler
    both_ways: Any = grpc.stream_stream_rpc_method_handler
    handlers = {
        "Generate": by_stream(servicer.Generate, orchestrator_pb2.GenerateRequest.FromString),
        "Converse": both_ways(servicer.Converse, orchestrator_pb2.ConverseRequest.FromString),
    }
    # They replace the handlers that protobuf has generated.
    server.add_registered_method_handlers(SERVICE_NAME, handlers)
