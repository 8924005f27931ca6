"""The controls of a running replica, free of gRPC: adapters, sleep, profiles, caches, and lists of steps."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

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
ItemT = TypeVar("ItemT")


@dataclass(frozen=True)
class Page(Generic[ItemT]):
    """One page of a sorted list; `next_token` is empty on the last page."""

    items: Sequence[ItemT]
    next_token: str


def page_of(items: Iterable[ItemT], key: Callable[[ItemT], str], *, page_size: int, page_token: str) -> Page[ItemT]:
    """Sorts items by key; returns at most `page_size` whose keys follow `page_token`. 0 stands for DEFAULT_PAGE."""
    left = sorted((item for item in items if key(item) > page_token), key=key)
    page = left[: min(page_size or DEFAULT_PAGE, MAX_PAGE)]
    return Page(page, key(page[-1]) if len(page) < len(left) else "")


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

    def list_adapters(self, *, page_size: int, page_token: str) -> Page[Adapter]:
        """Returns the loaded adapters whose names follow `page_token`."""
        adapters = self._require(self._abilities.adapters, "adapters", ready=False).list_adapters()
        return page_of(adapters, attrgetter("name"), page_size=page_size, page_token=page_token)

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

    # -- steps

    def list_steps(self, request_id: str, *, page_size: int, page_token: str) -> Page[StepReport]:
        """Returns the running steps, of one request or of all, whose ids follow `page_token`."""
        reports = self._runtime.reports(request_id)
        return page_of(reports, attrgetter("step_id"), page_size=page_size, page_token=page_token)

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
