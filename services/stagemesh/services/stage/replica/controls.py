"""The controls of a running replica, independent of gRPC: adapters, sleep, profiles, caches, and lists of steps."""

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
    """One page of a sorted list. `next_token` is empty on the last page."""

    items: Sequence[ItemT]
    next_token: str


def page_of(items: Iterable[ItemT], key: Callable[[ItemT], str], *, page_size: int, page_token: str) -> Page[ItemT]:
    """Returns the first `page_size` items (0: DEFAULT_PAGE) with keys after `page_token`, sorted by key."""
    left = sorted((item for item in items if key(item) > page_token), key=key)
    page = left[: min(page_size or DEFAULT_PAGE, MAX_PAGE)]
    return Page(page, key(page[-1]) if len(page) < len(left) else "")


class StageControls:
    """Calls the engine's abilities. Rejects steps while the engine must be idle.

    Every call raises NotReadyError if the replica is not ready, and UnsupportedError if the engine lacks the ability.
    """

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime = runtime
        # A wake call that arrives while the replica is falling asleep waits until it is asleep.
        self._falling_asleep = asyncio.Lock()

    # -- adapters

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Loads an adapter from the folder `path` on the replica's machine."""
        return await self._require(self._abilities.adapters, "adapters").load(name, path)

    async def unload_adapter(self, name: str, *, drain: bool) -> None:
        """Unloads an adapter. With `drain`, waits until no task uses it."""
        await self._require(self._abilities.adapters, "adapters").unload(name, drain=drain)

    async def pin_adapter(self, name: str) -> Adapter:
        """Reserves a slot for a loaded adapter until it is unloaded."""
        return await self._require(self._abilities.adapters, "adapters").pin(name)

    def list_adapters(self, *, page_size: int, page_token: str) -> Page[Adapter]:
        """Returns a page of the loaded adapters, starting after the name `page_token`."""
        adapters = self._require(self._abilities.adapters, "adapters", ready=False).list_adapters()
        return page_of(adapters, attrgetter("name"), page_size=page_size, page_token=page_token)

    # -- sleep

    async def sleep(self, level: int, *, drain: bool) -> Sequence[str]:
        """Puts the engine to sleep once no step is running. Rejects new steps at once. Returns the tags asleep.

        Raises NotReadyError if steps are running and `drain` is False. A call cancelled while waiting changes nothing.
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
        """Wakes the parts with these tags, or all parts if empty. Returns the tags of the parts that are still asleep.

        The replica accepts steps again once no part is asleep.
        """
        engine = self._require(self._abilities.sleep, "sleep", ready=False)
        async with self._falling_asleep:
            try:
                await engine.wake(tags)
            finally:
                self._resume_if_awake(engine)
            return engine.asleep()

    def _resume_if_awake(self, engine: SleepControl) -> None:
        """Resumes accepting steps if no part of the engine is asleep."""
        if not engine.asleep():
            self._runtime.resume()

    # -- profiles and caches

    async def start_profile(self, folder: str, *, max_steps: int | None) -> str:
        """Starts a profile, which ends after `max_steps` steps unless None. Returns the absolute path of its folder."""
        profiles = self._require(self._abilities.profiles, "profile")
        return await profiles.start(folder, max_steps=max_steps)

    async def stop_profile(self) -> Sequence[str]:
        """Stops the profile and returns the paths of its files."""
        return await self._require(self._abilities.profiles, "profile", ready=False).stop()

    async def clear_caches(self, *, preempt: bool) -> None:
        """Removes all cached results. With `preempt`, also removes results that running tasks use."""
        await self._require(self._abilities.caches, "caches").clear_caches(preempt=preempt)

    def cache_statistics(self) -> CacheStatistics:
        """Returns the statistics of the engine's cache."""
        return self._require(self._abilities.caches, "caches", ready=False).cache_statistics()

    # -- steps

    def list_steps(self, request_id: str, *, page_size: int, page_token: str) -> Page[StepReport]:
        """Returns a page of the running steps, starting after the id `page_token`. An empty `request_id` means all."""
        reports = self._runtime.reports(request_id)
        return page_of(reports, attrgetter("step_id"), page_size=page_size, page_token=page_token)

    # -- internal

    @property
    def _abilities(self) -> EngineAbilities:
        return self._runtime.engine.abilities

    def _require(self, ability: AbilityT | None, name: str, *, ready: bool = True) -> AbilityT:
        """Returns the ability. With `ready`, the replica must accept steps. Otherwise the engine must be loaded."""
        self._runtime.check_loaded()
        if ability is None:
            config = self._runtime.config
            raise UnsupportedError(
                f"engine {config.engine} of stage {config.stage} does not have the ability {name}",
                metadata={"engine": config.engine, "ability": name},
            )
        if ready:
            self._runtime.check_ready()
        return ability
