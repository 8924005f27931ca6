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
    """One page of a sorted list. `next_token` is the `page_token` of the next page, or empty on the last page."""

    items: Sequence[ItemT]
    next_token: str


def page_of(items: Iterable[ItemT], key: Callable[[ItemT], str], *, page_size: int, page_token: str) -> Page[ItemT]:
    """Returns one page of the items with keys greater than `page_token`, sorted by key.

    `page_size` is the maximum number of items. 0 means DEFAULT_PAGE, and values above MAX_PAGE mean MAX_PAGE.
    """
    left = sorted((item for item in items if key(item) > page_token), key=key)
    page = left[: min(page_size or DEFAULT_PAGE, MAX_PAGE)]
    return Page(page, key(page[-1]) if len(page) < len(left) else "")


class StageControls:
    """The operator controls of one replica. Each control calls an optional ability of the engine.

    Rejects steps while the engine must be idle. Every method raises NotReadyError if the replica is not ready, and
    UnsupportedError if the engine lacks the ability.
    """

    def __init__(self, runtime: StageRuntime) -> None:
        self._runtime = runtime
        # A wake call that arrives while the replica is falling asleep waits until the replica is asleep.
        self._falling_asleep = asyncio.Lock()

    # -- adapters

    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Loads an adapter from the folder `path` on the replica's machine."""
        return await self._require(self._abilities.adapters, "adapters").load(name, path)

    async def unload_adapter(self, name: str, *, drain: bool) -> None:
        """Unloads an adapter. With `drain`, first waits until no task uses the adapter."""
        await self._require(self._abilities.adapters, "adapters").unload(name, drain=drain)

    async def pin_adapter(self, name: str) -> Adapter:
        """Reserves a slot for a loaded adapter until the adapter is unloaded."""
        return await self._require(self._abilities.adapters, "adapters").pin(name)

    def list_adapters(self, *, page_size: int, page_token: str) -> Page[Adapter]:
        """Returns a page of the loaded adapters, starting after the name `page_token`."""
        adapters = self._require(self._abilities.adapters, "adapters", ready=False).list_adapters()
        return page_of(adapters, attrgetter("name"), page_size=page_size, page_token=page_token)

    # -- sleep

    async def sleep(self, level: int, *, drain: bool) -> Sequence[str]:
        """Rejects new steps, waits until no step is running, and puts the engine to sleep.

        Returns the tags of the engine's sleeping parts. Raises NotReadyError if steps are running and `drain` is False.
        If the call is cancelled while it waits, the replica accepts steps again.
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
        """Wakes the engine's parts with these tags, or all parts if `tags` is empty.

        Returns the tags of the parts that are still asleep. The replica accepts steps again once no part is asleep.
        """
        engine = self._require(self._abilities.sleep, "sleep", ready=False)
        async with self._falling_asleep:
            try:
                await engine.wake(tags)
            finally:
                self._resume_if_awake(engine)
            return engine.asleep()

    def _resume_if_awake(self, engine: SleepControl) -> None:
        """Accepts steps again if no part of the engine is asleep."""
        if not engine.asleep():
            self._runtime.resume()

    # -- profiles and caches

    async def start_profile(self, folder: str, *, max_steps: int | None) -> str:
        """Starts a profile and returns the absolute path of its folder.

        Recording ends after `max_steps` steps. If `max_steps` is None, only `stop_profile` ends recording.
        """
        profiles = self._require(self._abilities.profiles, "profile")
        return await profiles.start(folder, max_steps=max_steps)

    async def stop_profile(self) -> Sequence[str]:
        """Stops the profile and returns the paths of its files."""
        return await self._require(self._abilities.profiles, "profile", ready=False).stop()

    async def clear_caches(self, *, preempt: bool) -> None:
        """Removes all cached results. With `preempt`, also removes results that running tasks use."""
        await self._require(self._abilities.caches, "caches").clear_caches(preempt=preempt)

    def cache_statistics(self) -> CacheStatistics:
        return self._require(self._abilities.caches, "caches", ready=False).cache_statistics()

    # -- steps

    def list_steps(self, request_id: str, *, page_size: int, page_token: str) -> Page[StepReport]:
        """Returns a page of the running steps with ids after `page_token`, sorted by id.

        Lists the steps of one request, or of all requests if `request_id` is empty.
        """
        reports = self._runtime.reports(request_id)
        return page_of(reports, attrgetter("step_id"), page_size=page_size, page_token=page_token)

    # -- internal

    @property
    def _abilities(self) -> EngineAbilities:
        return self._runtime.engine.abilities

    def _require(self, ability: AbilityT | None, name: str, *, ready: bool = True) -> AbilityT:
        """Returns `ability`. Raises UnsupportedError if `ability` is None.

        Raises NotReadyError if the engine is not loaded, or if `ready` is True and the replica does not accept steps.
        """
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
