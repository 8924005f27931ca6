"""StageControlService: translates, and leaves every decision to the controls."""

from typing import TYPE_CHECKING, Any, TypeAlias

from stagemesh.rpc.handlers import answering
from stagemesh.services.engines.abilities import Adapter
from stagemesh.services.stage.replica.controls import StageControls
from stagemesh.services.stage.replica.runtime import StageRuntime
from stagemesh.services.stage.service.report_conversion import report_to_wire
from stagemesh.v1 import control_pb2, control_pb2_grpc

if TYPE_CHECKING:
    import grpc

_Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"

SERVICE_NAME = control_pb2.DESCRIPTOR.services_by_name["StageControlService"].full_name


class StageControlServicer(control_pb2_grpc.StageControlServiceServicer):
    """Serves one replica's controls."""

    def __init__(self, runtime: StageRuntime) -> None:
        self._controls = StageControls(runtime)
        self._where = {"stage": runtime.config.stage, "replica": runtime.config.replica}

    async def LoadAdapter(  # noqa: N802
        self, request: control_pb2.LoadAdapterRequest, context: _Context
    ) -> control_pb2.LoadAdapterResponse:
        """See the proto."""
        async with answering(context, **self._where):
            adapter = await self._controls.load_adapter(request.name, request.path)
            return control_pb2.LoadAdapterResponse(adapter=_adapter(adapter))

    async def UnloadAdapter(  # noqa: N802
        self, request: control_pb2.UnloadAdapterRequest, context: _Context
    ) -> control_pb2.UnloadAdapterResponse:
        """See the proto."""
        async with answering(context, **self._where):
            await self._controls.unload_adapter(request.name, drain=_drains(request.when_busy))
            return control_pb2.UnloadAdapterResponse()

    async def ListAdapters(  # noqa: N802
        self, request: control_pb2.ListAdaptersRequest, context: _Context
    ) -> control_pb2.ListAdaptersResponse:
        """See the proto."""
        async with answering(context, **self._where):
            page = self._controls.list_adapters(page_size=request.page_size, page_token=request.page_token)
            return control_pb2.ListAdaptersResponse(
                adapters=map(_adapter, page.adapters), next_page_token=page.next_token
            )

    async def PinAdapter(  # noqa: N802
        self, request: control_pb2.PinAdapterRequest, context: _Context
    ) -> control_pb2.PinAdapterResponse:
        """See the proto."""
        async with answering(context, **self._where):
            return control_pb2.PinAdapterResponse(adapter=_adapter(await self._controls.pin_adapter(request.name)))

    async def Sleep(  # noqa: N802
        self, request: control_pb2.SleepRequest, context: _Context
    ) -> control_pb2.SleepResponse:
        """See the proto."""
        async with answering(context, **self._where):
            asleep = await self._controls.sleep(request.level, drain=_drains(request.when_busy))
            return control_pb2.SleepResponse(asleep=asleep)

    async def Wake(  # noqa: N802
        self, request: control_pb2.WakeRequest, context: _Context
    ) -> control_pb2.WakeResponse:
        """See the proto."""
        async with answering(context, **self._where):
            return control_pb2.WakeResponse(asleep=await self._controls.wake(request.tags))

    async def StartProfile(  # noqa: N802
        self, request: control_pb2.StartProfileRequest, context: _Context
    ) -> control_pb2.StartProfileResponse:
        """See the proto."""
        async with answering(context, **self._where):
            max_steps = request.max_steps if request.HasField("max_steps") else None
            folder = await self._controls.start_profile(request.folder, max_steps=max_steps)
            return control_pb2.StartProfileResponse(folder=folder)

    async def StopProfile(  # noqa: N802
        self,
        request: control_pb2.StopProfileRequest,  # noqa: ARG002
        context: _Context,
    ) -> control_pb2.StopProfileResponse:
        """See the proto."""
        async with answering(context, **self._where):
            return control_pb2.StopProfileResponse(files=await self._controls.stop_profile())

    async def ClearCaches(  # noqa: N802
        self, request: control_pb2.ClearCachesRequest, context: _Context
    ) -> control_pb2.ClearCachesResponse:
        """See the proto."""
        async with answering(context, **self._where):
            await self._controls.clear_caches(preempt=request.preempt_running)
            return control_pb2.ClearCachesResponse()

    async def GetCacheStatistics(  # noqa: N802
        self,
        request: control_pb2.GetCacheStatisticsRequest,  # noqa: ARG002
        context: _Context,
    ) -> control_pb2.GetCacheStatisticsResponse:
        """See the proto."""
        async with answering(context, **self._where):
            figures = self._controls.cache_statistics()
            return control_pb2.GetCacheStatisticsResponse(
                blocks=figures.blocks,
                block_tokens=figures.block_tokens,
                prefix_caching=figures.prefix_caching,
                prompt_tokens=figures.prompt_tokens,
                cached_tokens=figures.cached_tokens,
                entries=figures.entries,
                size_bytes=figures.size_bytes,
                limit_bytes=figures.limit_bytes,
                hits=figures.hits,
                misses=figures.misses,
            )

    async def Drain(  # noqa: N802
        self,
        request: control_pb2.DrainRequest,
        context: _Context,
    ) -> control_pb2.DrainResponse:
        """See the proto."""
        async with answering(context, **self._where):
            move_after_s = request.move_after_s if request.HasField("move_after_s") else None
            return control_pb2.DrainResponse(running=self._controls.drain(move_after_s=move_after_s))

    async def Resume(  # noqa: N802
        self,
        request: control_pb2.ResumeRequest,  # noqa: ARG002
        context: _Context,
    ) -> control_pb2.ResumeResponse:
        """See the proto."""
        async with answering(context, **self._where):
            self._controls.resume()
            return control_pb2.ResumeResponse()

    async def Shutdown(  # noqa: N802
        self,
        request: control_pb2.ShutdownRequest,  # noqa: ARG002
        context: _Context,
    ) -> control_pb2.ShutdownResponse:
        """See the proto."""
        async with answering(context, **self._where):
            self._controls.shut_down()
            return control_pb2.ShutdownResponse()

    async def ListSteps(  # noqa: N802
        self, request: control_pb2.ListStepsRequest, context: _Context
    ) -> control_pb2.ListStepsResponse:
        """See the proto."""
        async with answering(context, **self._where):
            page = self._controls.list_steps(
                request.request_id, page_size=request.page_size, page_token=request.page_token
            )
            steps = map(report_to_wire, page.steps)
            return control_pb2.ListStepsResponse(steps=steps, next_page_token=page.next_token)


def _adapter(adapter: Adapter) -> control_pb2.Adapter:
    return control_pb2.Adapter(
        name=adapter.name,
        path=adapter.path,
        rank=adapter.rank,
        pinned=adapter.pinned,
        running=adapter.running,
    )


def _drains(policy: "control_pb2.BusyPolicy.ValueType") -> bool:
    return policy == control_pb2.BUSY_POLICY_DRAIN
