"""What some engines can do beside running tasks; an engine declares each ability by its type.

Every call is safe while tasks run, unless it says otherwise, and calls that would harm each other wait for each other.
A call that is cancelled has either happened or not: it never stops halfway.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Adapter:
    """A LoRA adapter that is loaded."""

    name: str
    """What tasks call it (`Task.adapter`)."""
    path: str
    """Its folder."""
    rank: int
    pinned: bool = False
    running: int = 0
    """Tasks that use it."""


class AdapterControl(ABC):
    """Tasks can name an adapter, and adapters come and go. A task that names one that is not loaded fails alone."""

    @abstractmethod
    async def load_adapter(self, name: str, path: str) -> Adapter:
        """Reads and checks an adapter. Loading it again is no error.

        Raises InvalidRequestError for what is no adapter of this model, ExistsError where the name stands for another
        folder, OverloadedError where there is no room, NotReadyError where the engine takes none or sleeps.
        """

    @abstractmethod
    async def unload_adapter(self, name: str, *, drain: bool) -> None:
        """Forgets an adapter. With `drain` new tasks that name it are refused and those that run are waited for.

        Raises NotFoundError, and NotReadyError while tasks use it and `drain` is not set.
        """

    @abstractmethod
    async def pin_adapter(self, name: str) -> Adapter:
        """Keeps an adapter in its slot until it is unloaded; tasks that name others then share those that are left.

        Raises NotFoundError, and OverloadedError where the others would have no slot.
        """

    @abstractmethod
    def adapters(self) -> Sequence[Adapter]:
        """Those that are loaded, by name."""


class SleepControl(ABC):
    """The engine can give its device's memory back and take it again. A sleeping engine is given no task."""

    @abstractmethod
    def check_sleep(self, level: int) -> None:
        """Raises UnsupportedError where the device cannot sleep, NotReadyError where the engine was not started for it,
        InvalidRequestError for a level that it does not have."""

    @abstractmethod
    async def sleep(self, level: int) -> None:
        """Falls asleep. Called without a task running, after `check_sleep`."""

    @abstractmethod
    async def wake(self, tags: Sequence[str]) -> None:
        """Wakes what is named, or all; raises InvalidRequestError for what does not sleep."""

    @abstractmethod
    def asleep(self) -> Sequence[str]:
        """What sleeps, in the engine's own words; nothing while it takes tasks."""


class ProfileControl(ABC):
    """The engine can record what it computes."""

    @abstractmethod
    async def start_profile(self, folder: str, *, max_steps: int | None) -> str:
        """Begins a recording that ends by itself after `max_steps`; returns its folder, absolute.

        Raises InvalidRequestError for a folder that is not allowed, NotReadyError where one goes on already.
        """

    @abstractmethod
    async def stop_profile(self) -> Sequence[str]:
        """Ends the recording; returns its files, which lie in their folder. Raises NotReadyError without one."""


@dataclass(frozen=True)
class CacheStatistics:
    """A cache in figures: a key-value cache by blocks and tokens, any other by entries and bytes, the rest being 0.

    Tokens, hits and misses count since the engine's start.
    """

    blocks: int = 0
    block_tokens: int = 0
    prefix_caching: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that were found in it."""
    entries: int = 0
    size_bytes: int = 0
    limit_bytes: int = 0
    hits: int = 0
    misses: int = 0


class CacheControl(ABC):
    """The engine keeps what it computed for earlier tasks."""

    @abstractmethod
    async def clear_caches(self, *, preempt: bool) -> None:
        """Forgets it all. With `preempt` running tasks give up theirs and compute it again, with the same outcome.

        Raises NotReadyError while a task holds any and `preempt` is not set.
        """

    @abstractmethod
    def cache_statistics(self) -> CacheStatistics:
        """The figures at this moment."""
