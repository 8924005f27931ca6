"""The controls of a running replica, free of gRPC: adapters, sleep, profiles, caches, draining, and its steps."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

from stagemesh.common.errors import UnsupportedError
from stagemesh.services.engines.abilities import (
    Adapter,
    CacheStatistics,
    EngineAbilities,
    SleepControl,
)
from stagemesh.services.stage.replica.runtime import StageRuntime
from stagemesh.services.stage.step.events import StepReport

DEFAULT_PAGE, MAX_PAGE = 100, 1000

AbilityT = TypeVar("AbilityT")


@dataclass(frozen=True)
class AdapterPage:
    """One page of the loaded adapters, sorted by name; `next_token` is empty on the last page."""

    adapters: Sequence[Adapter]
    next_token: str


@dataclass(frozen=True)
class StepPage:
    """One page of the running steps, sorted by id; `next_token` is empty on the last page."""

    steps: Sequence[StepReport]
    next_token: str


class StageControls:
    """Looks up the engine's abilities, and keeps steps away from an engine that must be idle.

    Every call raises NotReadyError if the replica is not ready, and UnsupportedError if the engine lacks the ability.
    """

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime = runtime
        # A call to wake that arrives while the replica falls asleep waits until it sleeps.
        self._falling_asleep = asyncio.Lock()

    # -- adapters

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Loads an adapter from a folder."""
        return await self._require(self._abilities.adapters, "adapters").load(name, path)

    async def unload_adapter(self, name: str, *, drain: bool) -> None:
        """Unloads an adapter; with `drain`, once no task uses it."""
        await self._require(self._abilities.adapters, "adapters").unload(name, drain=drain)

    async def pin_adapter(self, name: str) -> Adapter:
        """Reserves a slot for an adapter."""
        return await self._require(self._abilities.adapters, "adapters").pin(name)

    def list_adapters(self, *, page_size: int, page_token: str) -> AdapterPage:
        """Returns at most `page_size` adapters whose names follow `page_token`; 0 stands for DEFAULT_PAGE."""
        adapters = self._require(self._abilities.adapters, "adapters", ready=False).list_adapters()
        left = [adapter for adapter in adapters if adapter.name > page_token]
        page = left[: min(page_size or DEFAULT_PAGE, MAX_PAGE)]
        return AdapterPage(page, page[-1].name if len(page) < len(left) else "")

    # -- sleep

    async def sleep(self, level: int, *, drain: bool) -> Sequence[str]:
        """Puts the engine to sleep once no step runs, and returns what sleeps. New steps are rejected from now on.

        Raises NotReadyError if steps run and `drain` is False. If cancelled while it waits, nothing has changed.
        """
        engine = self._require(self._abilities.sleep, "sleep")
        engine.check_sleep(level)
        async with self._falling_asleep:
            try:
                await self._runtime.pause(f"at level {level}", drain=drain)
                await engine.sleep(level)
            finally:
                self._resume_if_awake(engine)
            return engine.asleep()

    async def wake(self, tags: Sequence[str]) -> Sequence[str]:
        """Wakes the parts with these tags, or all if empty, and returns what still sleeps.

        The replica accepts steps again once nothing sleeps.
        """
        engine = self._require(self._abilities.sleep, "sleep", ready=False)
        async with self._falling_asleep:
            try:
                await engine.wake(tags)
            finally:
                self._resume_if_awake(engine)
            return engine.asleep()

    def _resume_if_awake(self, engine: SleepControl) -> None:
        """Accepts steps if and only if the engine is awake, whether the call succeeded or not."""
        if not engine.asleep():
            self._runtime.resume()

    # -- profiles and caches

    async def start_profile(self, folder: str, *, max_steps: int | None) -> str:
        """Starts a recording of at most `max_steps` steps; returns its folder as an absolute path."""
        profiles = self._require(self._abilities.profiles, "profile")
        return await profiles.start(folder, max_steps=max_steps)

    async def stop_profile(self) -> Sequence[str]:
        """Ends the recording and returns its files."""
        return await self._require(self._abilities.profiles, "profile", ready=False).stop()

    async def clear_caches(self, *, preempt: bool) -> None:
        """Drops all cached results; with `preempt`, also those that running tasks use."""
        await self._require(self._abilities.caches, "caches").clear_caches(preempt=preempt)

    def cache_statistics(self) -> CacheStatistics:
        """Returns the statistics of the engine's cache."""
        return self._require(self._abilities.caches, "caches", ready=False).cache_statistics()

    # -- draining

    def drain(self, *, move_after_s: float | None = None) -> int:
        """Drains the replica and returns the number of running steps; see `StageRuntime.start_drain`."""
        return self._runtime.start_drain(move_after_s=move_after_s)

    def resume(self) -> None:
        """Ends a drain."""
        self._runtime.end_drain()

    def shut_down(self) -> None:
        """Ends the process as SIGTERM does, after this call."""
        self._runtime.on_shutdown()

    # -- steps

    def list_steps(self, request_id: str, *, page_size: int, page_token: str) -> StepPage:
        """Returns the running steps, of one request or of all, whose ids follow `page_token`."""
        return step_page(self._runtime.reports(request_id), page_size=page_size, page_token=page_token)

    # -- internal

    @property
    def _abilities(self) -> EngineAbilities:
        return self._runtime.engine.abilities

    def _require(self, ability: AbilityT | None, name: str, *, ready: bool = True) -> AbilityT:
        """Returns the ability. With `ready` the replica must accept steps; otherwise it may also sleep or drain."""
        self._runtime.check_loaded()
        if ability is None:
            config = self._runtime.config
            raise UnsupportedError(
                f"engine {config.engine} of stage {config.stage} has not the ability {name}",
                metadata={"engine": config.engine, "ability": name},
            )
        if ready:
            self._runtime.check_ready()
        return ability


def step_page(reports: Sequence[StepReport], *, page_size: int, page_token: str) -> StepPage:
    """Returns at most `page_size` reports whose step ids follow `page_token`; 0 stands for DEFAULT_PAGE."""
    left = sorted((report for report in reports if report.step_id > page_token), key=lambda report: report.step_id)
    page = left[: min(page_size or DEFAULT_PAGE, MAX_PAGE)]
    return StepPage(page, page[-1].step_id if len(page) < len(left) else "")
