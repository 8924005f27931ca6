"""The optional abilities of an engine: each is an object that the stage's controls look up in `EngineAbilities`.

Every method may be called while tasks run, unless its docstring says otherwise. Calls that would harm each other wait
for each other. A call that is cancelled has either taken full effect or none: it never stops halfway.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stagemesh.common.tensors import Tensors
from stagemesh.connectors.arena.worker_writer import Handle, PartitionTicket
from stagemesh.services.engines.profiles import Profiles


@dataclass(frozen=True)
class Adapter:
    """A loaded LoRA adapter."""

    name: str
    """The name by which tasks select the adapter (`Task.adapter`)."""
    path: str
    """The adapter's folder."""
    rank: int
    pinned: bool = False
    running: int = 0
    """The number of running tasks that use the adapter."""


class AdapterControl(Protocol):
    """Loads and unloads LoRA adapters. A task that names an adapter that is not loaded fails; other tasks do not."""

    async def load(self, name: str, path: str) -> Adapter:
        """Reads and checks an adapter. Loading the same adapter again is not an error.

        Raises InvalidRequestError if the folder holds no adapter for this model, ExistsError if the name is used for
        another folder, OverloadedError if no slot is free, NotReadyError if the engine takes no adapters or sleeps.
        """
        ...

    async def unload(self, name: str, *, drain: bool) -> None:
        """Unloads an adapter. With `drain`, new tasks that name it are rejected and running ones are awaited.

        Raises NotFoundError if it is not loaded, and NotReadyError if tasks use it and `drain` is False.
        """

    async def pin(self, name: str) -> Adapter:
        """Reserves a slot for an adapter until it is unloaded. The other adapters share the remaining slots.

        Raises NotFoundError if it is not loaded, and OverloadedError if no slot would remain for the others.
        """
        ...

    def list_adapters(self) -> Sequence[Adapter]:
        """Returns the loaded adapters, sorted by name."""
        ...


class SleepControl(Protocol):
    """Releases the memory of the engine's device and takes it again. A sleeping engine is given no task."""

    def check_sleep(self, level: int) -> None:
        """Raises UnsupportedError if the device cannot sleep, NotReadyError if the engine was started without sleep
        mode, InvalidRequestError if the level does not exist."""

    async def sleep(self, level: int) -> None:
        """Puts the engine to sleep. Must be called after `check_sleep`, while no task runs."""

    async def wake(self, tags: Sequence[str]) -> None:
        """Wakes the parts with these tags, or all if empty. Raises InvalidRequestError if a tag does not sleep."""

    def asleep(self) -> Sequence[str]:
        """Returns the tags of the parts that sleep, named by the engine. Empty while it accepts tasks."""
        ...


@dataclass(frozen=True)
class CacheStatistics:
    """Statistics of a cache. A key-value cache fills in blocks and tokens; any other cache, entries and bytes.

    Fields that do not apply are 0. Tokens, hits and misses are counted from the engine's start.
    """

    blocks: int = 0
    block_tokens: int = 0
    prefix_caching: bool = False
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """The number of prompt tokens that were found in the cache."""
    entries: int = 0
    size_bytes: int = 0
    limit_bytes: int = 0
    hits: int = 0
    misses: int = 0


class CacheControl(Protocol):
    """Clears and measures the cache of results of earlier tasks."""

    async def clear_caches(self, *, preempt: bool) -> None:
        """Drops all entries. With `preempt`, running tasks drop theirs and compute them again, with the same outcome.

        Raises NotReadyError if a task uses an entry and `preempt` is False.
        """

    def cache_statistics(self) -> CacheStatistics:
        """Returns the current statistics."""
        ...


class PartitionsArena(Protocol):
    """Reserves partitions of the replica's arena for worker processes."""

    def open_share(self, size_bytes: int) -> PartitionTicket:
        """Reserves a partition for one worker. Raises NotReadyError if it does not fit."""
        ...

    def adopt(self, handle: Handle) -> Tensors:
        """Returns the tensors that a worker wrote as views that hold their region.

        Raises InvalidChunkError if the worker did not write them.
        """
        ...

    def close_share(self, ticket: PartitionTicket) -> None:
        """Frees a partition after its worker has ended."""


@dataclass(frozen=True)
class EngineAbilities:
    """The abilities of one engine. None or False stands for an ability that the engine does not have.

    `can_pause`, `can_resume` and `use_partitions` are valid before the engine's start, the others after it.
    """

    can_pause: bool = False
    """Whether `submit` observes a task's `max_steps` and `pause_requested`."""
    can_resume: bool = False
    """Whether `submit` yields checkpoints and accepts a task's `resume_from`."""
    use_partitions: Callable[[PartitionsArena], None] | None = None
    """Called once, before `start`. For an engine whose worker processes write into the replica's arena."""
    adapters: AdapterControl | None = None
    sleep: SleepControl | None = None
    profiles: Profiles | None = None
    caches: CacheControl | None = None
