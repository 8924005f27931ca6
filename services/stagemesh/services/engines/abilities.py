"""The optional abilities of an engine, as one interface for each ability.

`EngineAbilities` contains the objects that implement the interfaces. The operator controls of a stage call these
objects. Every method may be called while tasks run, unless its docstring says otherwise. Conflicting calls wait for
each other. A cancelled call has either its full effect or no effect.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from prometheus_client.core import Metric

from stagemesh.connectors.arena.arena import Arena
from stagemesh.services.engines.controls import Profiles


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
    """Loads and unloads LoRA adapters.

    A task fails if it names an adapter that is not loaded. Other tasks are not affected.
    """

    async def load(self, name: str, path: str) -> Adapter:
        """Checks and loads the adapter in the folder `path`, and returns its description.

        If this adapter is already loaded from the same folder, only returns its description. Raises InvalidRequestError
        if the folder does not contain an adapter for this model, ExistsError if the name is used for another folder,
        OverloadedError if no further adapter can be loaded, and NotReadyError if the engine does not support adapters
        or is asleep.
        """
        ...

    async def unload(self, name: str, *, drain: bool) -> None:
        """Unloads an adapter.

        With `drain`, rejects new tasks that name the adapter, and first waits for the running tasks. Raises
        NotFoundError if the adapter is not loaded, and NotReadyError if tasks use the adapter and `drain` is False.
        """

    async def pin(self, name: str) -> Adapter:
        """Reserves a slot for an adapter until the adapter is unloaded. Returns the adapter's description.

        The other adapters share the remaining slots. Raises NotFoundError if the adapter is not loaded, and
        OverloadedError if no slot would remain for the other adapters.
        """
        ...

    def list_adapters(self) -> Sequence[Adapter]:
        """Returns the loaded adapters, sorted by name. Omits adapters that are being unloaded."""
        ...


class SleepControl(Protocol):
    """Puts an engine to sleep, which releases the memory of the engine's device, and wakes the engine again.

    A sleeping engine receives no tasks.
    """

    def check_sleep(self, level: int) -> None:
        """Raises an error if the engine cannot sleep at this level. The engine defines the levels.

        Raises UnsupportedError if the device does not support sleep, NotReadyError if the engine was started without
        sleep mode, and InvalidRequestError if the level does not exist.
        """

    async def sleep(self, level: int) -> None:
        """Puts the engine to sleep at this level. Called only after `check_sleep` and while no task is running."""

    async def wake(self, tags: Sequence[str]) -> None:
        """Wakes the parts of the engine with these tags, or all sleeping parts if `tags` is empty.

        Raises InvalidRequestError if a tag does not belong to a sleeping part.
        """

    def asleep(self) -> Sequence[str]:
        """Returns the tags of the engine's sleeping parts, such as "weights". Empty if the engine is awake.

        The engine defines the tags.
        """
        ...


@dataclass(frozen=True)
class CacheStatistics:
    """Statistics of an engine's cache.

    A key-value cache sets the fields for blocks and tokens. Any other cache sets the fields for entries and bytes. The
    fields that do not apply are 0. Tokens, hits and misses are counted since the engine's start.
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
    """Clears the engine's cache, which contains results of earlier tasks, and reports the cache's statistics."""

    async def clear_caches(self, *, preempt: bool) -> None:
        """Removes all entries from the cache.

        With `preempt`, running tasks recompute the entries that they still need, with equal results. Raises
        NotReadyError if a running task uses an entry and `preempt` is False.
        """

    def cache_statistics(self) -> CacheStatistics: ...


@dataclass(frozen=True)
class HandsOver:
    """The kinds of state that an engine hands over to engines of other stages by a transport of its own.

    Offer: the engine emits a packet with an `OfferedTicket` for each state, and keeps the state until the ticket's
    `on_release` is called. Accept: the engine that receives the ticket in a packet awaits `Ticket.accept` directly
    before it reads the state. Release: it calls `Ticket.release` when it has read the state, or drops the ticket.

    `Engine.submit` is called as soon as the step begins, so that an engine can accept a ticket and read the state
    before it schedules the task. An engine that cannot read a descriptor raises InvalidRequestError (INVALID_TICKET).
    """

    offers: frozenset[str] = frozenset()
    """The kinds of the tickets that the engine can emit."""
    accepts: frozenset[str] = frozenset()
    """The kinds of the tickets that the engine can read."""


@dataclass(frozen=True)
class EngineAbilities:
    """The optional abilities of one engine. A field that is None or False means that the engine lacks this ability.

    `can_pause`, `can_resume`, `use_partitions` and `metrics` are valid before the engine starts. The other fields are
    valid only afterwards. If `can_resume` depends on what the engine loads, it is True until then.
    """

    can_pause: bool = False
    """Whether a task of this engine pauses after `Task.max_steps` steps and when `Task.pause_requested` is set."""
    can_resume: bool = False
    """Whether `Engine.submit` yields checkpoints and can resume a task from `Task.resume_from`."""
    use_partitions: Callable[[Arena], None] | None = None
    """A function that passes the replica's arena to the engine, or None if the engine does not need the arena.

    The runtime calls the function once, before the engine starts. An engine needs the arena if its worker processes
    write tensors into it.
    """
    adapters: AdapterControl | None = None
    sleep: SleepControl | None = None
    profiles: Profiles | None = None
    caches: CacheControl | None = None
    metrics: Callable[[], Iterable[Metric]] | None = None
    """A function that returns the engine's own metrics, or None if it has none."""
    hands_over: HandsOver | None = None
