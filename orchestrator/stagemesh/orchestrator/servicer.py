"""OrchestratorService: proto in, a call of the orchestrator, proto out."""

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import TYPE_CHECKING, TypeAlias

from stagemesh.orchestrator.describe import describe_pipeline
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.validation import check_pipeline
from stagemesh.services.serving.answering import answering, streaming, time_left_s
from stagemesh.v1 import orchestrator_pb2, orchestrator_pb2_grpc

if TYPE_CHECKING:
    import grpc

_GenerateContext: TypeAlias = (
    "grpc.aio.ServicerContext[orchestrator_pb2.GenerateRequest, orchestrator_pb2.GenerateResponse]"
)
_CancelContext: TypeAlias = (
    "grpc.aio.ServicerContext[orchestrator_pb2.CancelRequestRequest, orchestrator_pb2.CancelRequestResponse]"
)
_DescribeContext: TypeAlias = (
    "grpc.aio.ServicerContext[orchestrator_pb2.DescribePipelineRequest, orchestrator_pb2.DescribePipelineResponse]"
)


class OrchestratorServicer(orchestrator_pb2_grpc.OrchestratorServiceServicer):
    """Serves one orchestrator."""

    def __init__(self, orchestrator: Orchestrator) -> None:
        self._orchestrator = orchestrator

    @streaming
    async def Generate(  # noqa: N802
        self, request: orchestrator_pb2.GenerateRequest, context: _GenerateContext
    ) -> AsyncIterator[orchestrator_pb2.GenerateResponse]:
        """See the proto."""
        where = {"request_id": request.request_id} if request.request_id else {}
        async with answering(context, **where):
            events = self._orchestrator.generate(request, time_left_s=time_left_s(context))
            async with aclosing(events):
                async for event in events:
                    yield event

    async def CancelRequest(  # noqa: N802
        self, request: orchestrator_pb2.CancelRequestRequest, context: _CancelContext
    ) -> orchestrator_pb2.CancelRequestResponse:
        """See the proto."""
        async with answering(context, request_id=request.request_id):
            await self._orchestrator.cancel(request.request_id, when_left=request.when_left)
        return orchestrator_pb2.CancelRequestResponse()

    async def DescribePipeline(  # noqa: N802
        self, request: orchestrator_pb2.DescribePipelineRequest, context: _DescribeContext
    ) -> orchestrator_pb2.DescribePipelineResponse:
        """See the proto."""
        async with answering(context):
            check_pipeline(request.pipeline, self._orchestrator.pipeline)
        return describe_pipeline(self._orchestrator)
