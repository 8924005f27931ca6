"""What an operator may change of a replica while it serves, free of gRPC."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from stagemesh.common.errors import UnsupportedError
from stagemesh.services.engines.abilities import (
    Adapter,
    AdapterControl,
    CacheControl,
    CacheStatistics,
    ProfileControl,
    SleepControl,
)
from stagemesh.services.stage.replica.runtime import StageRuntime
from stagemesh.services.stage.step.reports import StepPage, page_of

DEFAULT_PAGE, MAX_PAGE = 100, 1000


@dataclass(frozen=True)
class AdapterPage:
    """Some of the adapters, by name; `next_token` is empty for the last page."""

    adapters: Sequence[Adapter]
    next_token: str


class StageControls:
    """Asks the engine for what its type says it can do, and keeps steps away from it where it must be idle."""

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime = runtime
        # A call to wake that comes while the replica falls asleep waits until it has.
        self._falling_asleep = asyncio.Lock()

    # -- adapters

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """See `AdapterControl`."""
        engine = self._adapters()
        self._runtime.check_ready()
        return await engine.load_adapter(name, path)

    async def unload_adapter(self, name: str, *, drain: bool) -> None:
        """See `AdapterControl`."""
        engine = self._adapters()
        self._runtime.check_ready()
        await engine.unload_adapter(name, drain=drain)

    async def pin_adapter(self, name: str) -> Adapter:
        """See `AdapterControl`."""
        engine = self._adapters()
        self._runtime.check_ready()
        return await engine.pin_adapter(name)

    def list_adapters(self, *, page_size: int, page_token: str) -> AdapterPage:
        """The adapters whose names follow `page_token`, at most `page_size` of them; 0 is DEFAULT_PAGE."""
        engine = self._adapters()
        self._runtime.check_loaded()
        left = [adapter for adapter in engine.adapters() if adapter.name > page_token]
        page = left[: min(page_size or DEFAULT_PAGE, MAX_PAGE)]
        return AdapterPage(page, page[-1].name if len(page) < len(left) else "")

    # -- sleep

    async def sleep(self, level: int, *, drain: bool) -> Sequence[str]:
        """Puts the engine to sleep once no step runs, and returns what sleeps; steps are refused from now on.

        Raises NotReadyError while steps run and `drain` is not set. Cancelled while it waits, all is as before.
        """
        engine = self._sleeper()
        self._runtime.check_ready()
        engine.check_sleep(level)
        async with self._falling_asleep:
            try:
                await self._runtime.pause(f"at level {level}", drain=drain)
                await engine.sleep(level)
            finally:
                self._settle(engine)
            return engine.asleep()

    async def wake(self, tags: Sequence[str]) -> Sequence[str]:
        """Wakes what is named, or all, and returns what sleeps still; steps are taken when nothing does."""
        engine = self._sleeper()
        self._runtime.check_loaded()
        async with self._falling_asleep:
            try:
                await engine.wake(tags)
            finally:
                self._settle(engine)
            return engine.asleep()

    def _settle(self, engine: SleepControl) -> None:
        """Whatever came of a call, steps are taken if and only if the engine is awake."""
        if not engine.asleep():
            self._runtime.resume()

    # -- profiles and caches

    async def start_profile(self, folder: str, *, max_steps: int | None) -> str:
        """See `ProfileControl`."""
        engine = self._profiler()
        self._runtime.check_ready()
        return await engine.start_profile(folder, max_steps=max_steps)

    async def stop_profile(self) -> Sequence[str]:
        """See `ProfileControl`."""
        engine = self._profiler()
        self._runtime.check_loaded()
        return await engine.stop_profile()

    async def clear_caches(self, *, preempt: bool) -> None:
        """See `CacheControl`."""
        engine = self._cache()
        self._runtime.check_ready()
        await engine.clear_caches(preempt=preempt)

    def cache_statistics(self) -> CacheStatistics:
        """See `CacheControl`."""
        engine = self._cache()
        self._runtime.check_loaded()
        return engine.cache_statistics()

    # -- its life

    def drain(self, *, move_after_s: float | None = None) -> int:
        """See `StageRuntime.hold`."""
        return self._runtime.hold(move_after_s=move_after_s)

    def resume(self) -> None:
        """See `StageRuntime.release`."""
        self._runtime.release()

    def shut_down(self) -> None:
        """Has the process end as SIGTERM does, after this call."""
        self._runtime.on_shutdown()

    def list_steps(self, request_id: str, *, page_size: int, page_token: str) -> StepPage:
        """The steps that run, of one request or of all, whose ids follow `page_token`."""
        return page_of(self._runtime.reports(request_id), page_size=page_size, page_token=page_token)

    # -- inner workings

    def _adapters(self) -> AdapterControl:
        engine = self._runtime.engine
        if not isinstance(engine, AdapterControl):
            raise self._unable("adapters")
        return engine

    def _sleeper(self) -> SleepControl:
        engine = self._runtime.engine
        if not isinstance(engine, SleepControl):
            raise self._unable("sleep")
        return engine

    def _profiler(self) -> ProfileControl:
        engine = self._runtime.engine
        if not isinstance(engine, ProfileControl):
            raise self._unable("profile")
        return engine

    def _cache(self) -> CacheControl:
        engine = self._runtime.engine
        if not isinstance(engine, CacheControl):
            raise self._unable("caches")
        return engine

    def _unable(self, ability: str) -> UnsupportedError:
        config = self._runtime.config
        return UnsupportedError(
            f"engine {config.engine} of stage {config.stage} has not the ability {ability}",
            metadata={"engine": config.engine, "ability": ability},
        )
