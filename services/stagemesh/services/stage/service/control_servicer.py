"""The gRPC service StageControlService. Converts messages and calls `StageControls`."""

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeAlias

from stagemesh.common.connector_descriptors import number_of
from stagemesh.rpc.handlers import answering
from stagemesh.services.stage.replica.controls import StageControls
from stagemesh.services.stage.replica.runtime import StageRuntime
from stagemesh.services.stage.step.events import FlowReport, StepReport
from stagemesh.v1 import control_pb2, control_pb2_grpc

if TYPE_CHECKING:
    import grpc

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SERVICE_NAME = control_pb2.DESCRIPTOR.services_by_name["StageControlService"].full_name


class StageControlServicer(control_pb2_grpc.StageControlServiceServicer):
    """The servicer of StageControlService for one replica."""

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime, self._controls = runtime, StageControls(runtime)
        self._where = {"stage": runtime.config.stage, "replica": runtime.config.replica}

    async def LoadAdapter(
        self, request: control_pb2.LoadAdapterRequest, context: _Context
    ) -> control_pb2.LoadAdapterResponse:
        async with answering(context, **self._where):
            adapter = await self._controls.load_adapter(request.name, request.path)
            return control_pb2.LoadAdapterResponse(adapter=control_pb2.Adapter(**asdict(adapter)))

    async def UnloadAdapter(
        self, request: control_pb2.UnloadAdapterRequest, context: _Context
    ) -> control_pb2.UnloadAdapterResponse:
        async with answering(context, **self._where):
            await self._controls.unload_adapter(request.name, drain=_drains(request.when_busy))
            return control_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: control_pb2.ListAdaptersRequest, context: _Context
    ) -> control_pb2.ListAdaptersResponse:
        async with answering(context, **self._where):
            page = self._controls.list_adapters(page_size=request.page_size, page_token=request.page_token)
            adapters = [control_pb2.Adapter(**asdict(each)) for each in page.items]
            return control_pb2.ListAdaptersResponse(adapters=adapters, next_page_token=page.next_token)

    async def PinAdapter(
        self, request: control_pb2.PinAdapterRequest, context: _Context
    ) -> control_pb2.PinAdapterResponse:
        async with answering(context, **self._where):
            adapter = await self._controls.pin_adapter(request.name)
            return control_pb2.PinAdapterResponse(adapter=control_pb2.Adapter(**asdict(adapter)))

    async def Sleep(self, request: control_pb2.SleepRequest, context: _Context) -> control_pb2.SleepResponse:
        async with answering(context, **self._where):
            asleep = await self._controls.sleep(request.level, drain=_drains(request.when_busy))
            return control_pb2.SleepResponse(asleep=asleep)

    async def Wake(self, request: control_pb2.WakeRequest, context: _Context) -> control_pb2.WakeResponse:
        async with answering(context, **self._where):
            return control_pb2.WakeResponse(asleep=await self._controls.wake(request.tags))

    async def StartProfile(
        self, request: control_pb2.StartProfileRequest, context: _Context
    ) -> control_pb2.StartProfileResponse:
        async with answering(context, **self._where):
            max_steps = request.max_steps if request.HasField("max_steps") else None
            folder = await self._controls.start_profile(request.folder, max_steps=max_steps)
            return control_pb2.StartProfileResponse(folder=folder)

    async def StopProfile(
        self, request: control_pb2.StopProfileRequest, context: _Context
    ) -> control_pb2.StopProfileResponse:
        async with answering(context, **self._where):
            return control_pb2.StopProfileResponse(files=await self._controls.stop_profile())

    async def ClearCaches(
        self, request: control_pb2.ClearCachesRequest, context: _Context
    ) -> control_pb2.ClearCachesResponse:
        async with answering(context, **self._where):
            await self._controls.clear_caches(preempt=request.preempt_running)
            return control_pb2.ClearCachesResponse()

    async def GetCacheStatistics(
        self, request: control_pb2.GetCacheStatisticsRequest, context: _Context
    ) -> control_pb2.GetCacheStatisticsResponse:
        async with answering(context, **self._where):
            return control_pb2.GetCacheStatisticsResponse(**asdict(self._controls.cache_statistics()))

    async def Drain(self, request: control_pb2.DrainRequest, context: _Context) -> control_pb2.DrainResponse:
        async with answering(context, **self._where):
            move_after_s = request.move_after_s if request.HasField("move_after_s") else None
            return control_pb2.DrainResponse(running=self._runtime.start_drain(move_after_s=move_after_s))

    async def Resume(self, request: control_pb2.ResumeRequest, context: _Context) -> control_pb2.ResumeResponse:
        async with answering(context, **self._where):
            self._runtime.end_drain()
            return control_pb2.ResumeResponse()

    async def Shutdown(self, request: control_pb2.ShutdownRequest, context: _Context) -> control_pb2.ShutdownResponse:
        async with answering(context, **self._where):
            self._runtime.on_shutdown()
            return control_pb2.ShutdownResponse()

    async def ListSteps(
        self, request: control_pb2.ListStepsRequest, context: _Context
    ) -> control_pb2.ListStepsResponse:
        async with answering(context, **self._where):
            page = self._controls.list_steps(
                request.request_id, page_size=request.page_size, page_token=request.page_token
            )
            steps = map(_step_report, page.items)
            return control_pb2.ListStepsResponse(steps=steps, next_page_token=page.next_token)


def _drains(policy: "control_pb2.BusyPolicy.ValueType") -> bool:
    return policy == control_pb2.BUSY_POLICY_DRAIN


def _step_report(report: StepReport) -> control_pb2.StepReport:
    return control_pb2.StepReport(
        request_id=report.request_id,
        step_id=report.step_id,
        attempt=report.attempt,
        age_s=report.age_s,
        started=report.started,
        inlets=map(_flow_report, report.inlets),
        outlets=map(_flow_report, report.outlets),
    )


def _flow_report(report: FlowReport) -> control_pb2.FlowReport:
    fields: dict[str, Any] = asdict(report.status) | {"connector": number_of(report.status.connector)}
    return control_pb2.FlowReport(**fields, peer=report.peer)
