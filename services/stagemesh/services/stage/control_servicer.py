"""The gRPC service StageControlService. Converts messages, and calls `StageRuntime` and the engine's controls."""

from dataclasses import asdict
from operator import attrgetter

from stagemesh.rpc.handlers import Context, answered
from stagemesh.rpc.pages import page_of
from stagemesh.rpc.process_control import host_report, set_log_level
from stagemesh.services.engines.abilities import AdapterControl, CacheControl
from stagemesh.services.stage.runtime import StageRuntime
from stagemesh.v1 import control_pb2, control_pb2_grpc

SERVICE_NAME = control_pb2.DESCRIPTOR.services_by_name["StageControlService"].full_name


@answered
class StageControlServicer(control_pb2_grpc.StageControlServiceServicer):
    """The servicer of StageControlService for one replica."""

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime, self.where = runtime, runtime.where

    async def LoadAdapter(
        self, request: control_pb2.LoadAdapterRequest, context: Context
    ) -> control_pb2.LoadAdapterResponse:
        adapter = await self._adapters().load(request.name, request.path)
        return control_pb2.LoadAdapterResponse(adapter=control_pb2.Adapter(**asdict(adapter)))

    async def UnloadAdapter(
        self, request: control_pb2.UnloadAdapterRequest, context: Context
    ) -> control_pb2.UnloadAdapterResponse:
        await self._adapters().unload(request.name, drain=_drains(request.when_busy))
        return control_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: control_pb2.ListAdaptersRequest, context: Context
    ) -> control_pb2.ListAdaptersResponse:
        adapters = sorted(self._adapters(ready=False).list_adapters(), key=attrgetter("name"))
        items = (((each.name,), control_pb2.Adapter(**asdict(each))) for each in adapters)
        return page_of(control_pb2.ListAdaptersResponse, request, field="adapters", items=items)

    async def PinAdapter(
        self, request: control_pb2.PinAdapterRequest, context: Context
    ) -> control_pb2.PinAdapterResponse:
        adapter = await self._adapters().pin(request.name)
        return control_pb2.PinAdapterResponse(adapter=control_pb2.Adapter(**asdict(adapter)))

    async def Sleep(self, request: control_pb2.SleepRequest, context: Context) -> control_pb2.SleepResponse:
        asleep = await self._runtime.lifecycle.sleep(request.level, drain=_drains(request.when_busy))
        return control_pb2.SleepResponse(asleep=asleep)

    async def Wake(self, request: control_pb2.WakeRequest, context: Context) -> control_pb2.WakeResponse:
        return control_pb2.WakeResponse(asleep=await self._runtime.lifecycle.wake(request.tags))

    async def StartProfile(
        self, request: control_pb2.StartProfileRequest, context: Context
    ) -> control_pb2.StartProfileResponse:
        max_steps = request.max_engine_steps if request.HasField("max_engine_steps") else None
        profiles = self._runtime.lifecycle.require(self._runtime.engine.abilities.profiles, "profile")
        folder = await profiles.start(request.folder, max_steps=max_steps)
        return control_pb2.StartProfileResponse(folder=folder)

    async def StopProfile(
        self, request: control_pb2.StopProfileRequest, context: Context
    ) -> control_pb2.StopProfileResponse:
        profiles = self._runtime.lifecycle.require(self._runtime.engine.abilities.profiles, "profile", ready=False)
        return control_pb2.StopProfileResponse(files=await profiles.stop())

    async def ClearCaches(
        self, request: control_pb2.ClearCachesRequest, context: Context
    ) -> control_pb2.ClearCachesResponse:
        await self._caches().clear_caches(preempt=request.preempt_running)
        return control_pb2.ClearCachesResponse()

    async def GetCacheStatistics(
        self, request: control_pb2.GetCacheStatisticsRequest, context: Context
    ) -> control_pb2.GetCacheStatisticsResponse:
        statistics = self._caches(ready=False).cache_statistics()
        return control_pb2.GetCacheStatisticsResponse(**asdict(statistics))

    async def Drain(self, request: control_pb2.DrainRequest, context: Context) -> control_pb2.DrainResponse:
        move_after_s = request.move_after_s if request.HasField("move_after_s") else None
        return control_pb2.DrainResponse(running=self._runtime.lifecycle.start_drain(move_after_s=move_after_s))

    async def Resume(self, request: control_pb2.ResumeRequest, context: Context) -> control_pb2.ResumeResponse:
        self._runtime.lifecycle.end_drain()
        return control_pb2.ResumeResponse()

    async def Shutdown(self, request: control_pb2.ShutdownRequest, context: Context) -> control_pb2.ShutdownResponse:
        self._runtime.on_shutdown()
        return control_pb2.ShutdownResponse()

    async def ListSteps(self, request: control_pb2.ListStepsRequest, context: Context) -> control_pb2.ListStepsResponse:
        reports = sorted(self._runtime.reports(request.request_id), key=attrgetter("step_id"))
        items = (((report.step_id,), report) for report in reports)
        return page_of(control_pb2.ListStepsResponse, request, field="steps", items=items)

    async def SetLogLevel(
        self, request: control_pb2.SetLogLevelRequest, context: Context
    ) -> control_pb2.SetLogLevelResponse:
        return control_pb2.SetLogLevelResponse(previous=set_log_level(request.level, request.logger))

    async def DescribeHost(
        self, request: control_pb2.DescribeHostRequest, context: Context
    ) -> control_pb2.DescribeHostResponse:
        return control_pb2.DescribeHostResponse(report=host_report())

    def _adapters(self, *, ready: bool = True) -> AdapterControl:
        return self._runtime.lifecycle.require(self._runtime.engine.abilities.adapters, "adapters", ready=ready)

    def _caches(self, *, ready: bool = True) -> CacheControl:
        return self._runtime.lifecycle.require(self._runtime.engine.abilities.caches, "caches", ready=ready)


def _drains(policy: "control_pb2.BusyPolicy.ValueType") -> bool:
    return policy == control_pb2.BUSY_POLICY_DRAIN
