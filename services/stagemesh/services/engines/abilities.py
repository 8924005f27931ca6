"""The optional abilities of an engine. A stage's controls look up the object for each ability in `EngineAbilities`.

Every method may be called while tasks run, unless its docstring says otherwise. Calls that conflict wait for each
other. A cancelled call has either its full effect or no effect.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from stagemesh.connectors.arena.arena import Written
from stagemesh.connectors.arena.worker_writer import Handle, PartitionTicket
from stagemesh.services.engines.profiles import Profiles


@dataclass(frozen=True)
class Adapter:
    """A loaded LoRA adapter."""

    name: str
    """The name by which tasks select the adapter (`Task.adapter`)."""
    path: str
    """The path of the adapter's folder."""
    rank: int
    pinned: bool = False
    running: int = 0
    """The number of running tasks that use the adapter."""


class AdapterControl(Protocol):
    """Loads and unloads LoRA adapters. A task that names an adapter that is not loaded fails. Other tasks continue."""

    async def load(self, name: str, path: str) -> Adapter:
        """Checks and loads an adapter. Loading a loaded adapter again from the same folder has no effect.

        Raises InvalidRequestError if the folder does not contain an adapter for this model, ExistsError if the name is
        used for another folder, OverloadedError if no further adapter can be loaded, and NotReadyError if the engine
        does not support adapters or is asleep.
        """
        ...

    async def unload(self, name: str, *, drain: bool) -> None:
        """Unloads an adapter. With `drain`, rejects new tasks that name the adapter and waits for the running tasks.

        Raises NotFoundError if the adapter is not loaded, and NotReadyError if tasks use it and `drain` is False.
        """

    async def pin(self, name: str) -> Adapter:
        """Reserves a slot for an adapter until the adapter is unloaded. The other adapters share the remaining slots.

        Raises NotFoundError if the adapter is not loaded, and OverloadedError if no slot would remain for the others.
        """
        ...

    def list_adapters(self) -> Sequence[Adapter]:
        """Returns the loaded adapters, sorted by name."""
        ...


class SleepControl(Protocol):
    """Releases and reacquires the memory of the engine's device. A sleeping engine receives no tasks."""

    def check_sleep(self, level: int) -> None:
        """Checks whether the engine can sleep at this level.

        Raises UnsupportedError if the device does not support sleep, NotReadyError if the engine was started without
        sleep mode, and InvalidRequestError if the level does not exist.
        """

    async def sleep(self, level: int) -> None:
        """Puts the engine to sleep. Must be called only after `check_sleep` and while no task is running."""

    async def wake(self, tags: Sequence[str]) -> None:
        """Wakes the engine's parts with these tags, or all parts if `tags` is empty.

        Raises InvalidRequestError if a tag is not asleep.
        """

    def asleep(self) -> Sequence[str]:
        """Returns the tags of the engine's sleeping parts, or no tags if the engine is awake.

        The engine defines the tags.
        """
        ...


@dataclass(frozen=True)
class CacheStatistics:
    """Statistics of a cache. A key-value cache sets blocks and tokens. Any other cache sets entries and bytes.

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
    """Clears and measures the engine's cache, which contains results of earlier tasks."""

    async def clear_caches(self, *, preempt: bool) -> None:
        """Removes all cached entries. With `preempt`, running tasks recompute the entries that they use, with equal
        results.

        Raises NotReadyError if a task uses an entry and `preempt` is False.
        """

    def cache_statistics(self) -> CacheStatistics: ...


class PartitionsArena(Protocol):
    """The interface through which an engine reserves partitions of the replica's arena for worker processes."""

    def open_partition(self, size_bytes: int) -> PartitionTicket:
        """Reserves a partition for one worker process. Raises NotReadyError if the arena has too little free space."""
        ...

    def adopt(self, handle: Handle) -> Written:
        """Returns the tensors that a worker wrote, with the caller's reference to their memory region.

        Raises InvalidChunkError if `handle` does not refer to tensors that a worker wrote.
        """
        ...

    def close_partition(self, ticket: PartitionTicket) -> None:
        """Frees a partition after its worker has ended."""


@dataclass(frozen=True)
class EngineAbilities:
    """The abilities of one engine. None or False means that the engine does not have the ability.

    `can_pause`, `can_resume` and `use_partitions` are valid before the engine starts, the other fields afterwards.
    """

    can_pause: bool = False
    """Whether `Engine.submit` respects a task's `max_steps` and `pause_requested`."""
    can_resume: bool = False
    """Whether `Engine.submit` yields checkpoints and accepts a task's `resume_from`."""
    use_partitions: Callable[[PartitionsArena], None] | None = None
    """Called once, before the engine starts. Set by an engine with worker processes that write into the replica's
    arena."""
    adapters: AdapterControl | None = None
    sleep: SleepControl | None = None
    profiles: Profiles | None = None
    caches: CacheControl | None = None
