"""LoRA adapters of an engine: the slots that adapters need, and the tasks that use adapters."""

import asyncio
import itertools
import re
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from stagemesh.common.errors import ExistsError, InvalidRequestError, NotFoundError, NotReadyError, OverloadedError
from stagemesh.common.notification import Notifier
from stagemesh.services.engines.abilities import Adapter
from stagemesh.services.engines.controls import run_to_completion

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


def check_name(name: str) -> None:
    """Raises InvalidRequestError if `name` is not a valid name for an adapter."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"an adapter's name is {name[:140]!r}; it must be 1 to 128 letters, digits, '.', '_', ':', '-' or '/'",
            reason="INVALID_ADAPTER",
        )


def check_rank(name: str, rank: int, *, most: int, taker: str = "the stage") -> None:
    """Raises InvalidRequestError if the rank of the adapter `name` is greater than `most`.

    `taker` is the name of the stage in the error message.
    """
    if rank > most:
        raise InvalidRequestError(
            f"adapter {name!r} has rank {rank}; {taker} accepts a rank of at most {most}, its option max_lora_rank",
            reason="INVALID_ADAPTER",
        )


@dataclass
class Entry:
    """A loaded adapter: its source, its id in the engine, and its current use."""

    name: str
    path: str
    number: int
    """The adapter's id in the engine. Ids are never reused."""
    rank: int = 0
    reserved: bool = False
    """Whether a slot is reserved for this adapter, because the adapter is pinned or is about to be pinned."""
    pinned: bool = False
    """Whether the engine has pinned the adapter."""
    unloading: bool = False
    """Whether the adapter is being unloaded. New tasks cannot use the adapter then."""
    users: int = 0
    """The number of running tasks that use the adapter."""

    @property
    def adapter(self) -> Adapter:
        """The description of the adapter that operators receive."""
        return Adapter(self.name, self.path, self.rank, self.pinned, self.users)


class AdapterManager(ABC):
    """Manages the LoRA adapters of an engine. Implements `abilities.AdapterControl`.

    Enforces two limits that vLLM does not check itself:

    - A step may use at most `slots` different adapters. vLLM's scheduler counts the adapters of a step, but assumes
      that a pinned adapter can be evicted. A step that needs the slot of a pinned adapter crashes the engine.
      Therefore, while an adapter is pinned, the manager limits the other adapters in use to the number of remaining
      slots.
    - At most `capacity` adapters are loaded. vLLM would otherwise evict an adapter that is in use, and read the adapter
      again in the middle of a step.
    """

    def __init__(self, *, stage: str, slots: int, capacity: int, capacity_option: str, lock: asyncio.Lock) -> None:
        """Creates the manager.

        `slots` is the maximum number of adapters in a step, or 0 if the stage was started without adapters. `capacity`
        is the maximum number of loaded adapters. `capacity_option` is the name of the stage option that sets
        `capacity`. The manager acquires `lock` for each change, so that no other control, such as sleep, changes the
        engine at the same time.
        """
        self._stage, self._slots = stage, slots
        self._capacity, self._capacity_option = capacity, capacity_option
        self._lock, self._pinning = lock, asyncio.Lock()
        self._entries: dict[str, Entry] = {}
        self._numbers = itertools.count(1)
        self._changed = Notifier()

    def list_adapters(self) -> Sequence[Adapter]:
        return [entry.adapter for _, entry in sorted(self._entries.items()) if not entry.unloading]

    @asynccontextmanager
    async def lease(self, name: str | None) -> AsyncGenerator[Entry | None]:
        """Waits for a slot and yields the adapter's entry. A task may use the adapter until the context exits.

        Yields None if `name` is None. Raises NotFoundError if the adapter is not loaded, and NotReadyError if the
        adapter is being unloaded.
        """
        if name is None:
            yield None
            return
        await self._until(lambda: self._may_run(self._usable(name)))
        entry = self._usable(name)
        entry.users += 1
        try:
            yield entry
        finally:
            entry.users -= 1
            self._changed.fire()

    async def load(self, name: str, path: str) -> Adapter:
        self._check_enabled()
        check_name(name)
        async with self._lock:
            self._check_awake()
            entry = self._find_loaded(name, path)
            if entry is None:
                entry = await run_to_completion(self._add(name, path))
            return entry.adapter

    async def unload(self, name: str, *, drain: bool) -> None:
        self._check_enabled()
        entry = self._usable(name)
        if entry.users and not drain:
            raise NotReadyError(
                f"adapter {name!r} of stage {self._stage} is used by {entry.users} requests; wait for them, or set "
                "drain so that the call waits",
                reason="ADAPTER_IN_USE",
                metadata={"adapter": name, "running": str(entry.users)},
            )
        entry.unloading = True
        try:
            await self._until(lambda: not entry.users)
            async with self._lock:
                self._check_awake()
                await run_to_completion(self._remove(entry))
        finally:
            entry.unloading = False
            self._changed.fire()

    async def pin(self, name: str) -> Adapter:
        self._check_enabled()
        async with self._pinning:
            entry = self._usable(name)
            self._check_pin(entry)
            entry.reserved = True
            try:
                # The other adapters in use share the remaining slots.
                await self._until(lambda: len(self._sharing()) <= self._free_slots)
                async with self._lock:
                    self._check_awake()
                    await run_to_completion(self._pin(entry))
            finally:
                entry.reserved = entry.pinned
                self._changed.fire()
            return entry.adapter

    # -- to be implemented by an engine

    @abstractmethod
    async def _engine_load(self, entry: Entry) -> int:
        """Checks and loads an adapter, and returns its LoRA rank.

        Raises InvalidRequestError if the folder does not contain an adapter for this model.
        """

    @abstractmethod
    async def _engine_unload(self, entry: Entry) -> None: ...

    @abstractmethod
    async def _engine_pin(self, entry: Entry) -> None: ...

    @abstractmethod
    def _check_awake(self) -> None:
        """Raises NotReadyError if the engine is asleep, because adapters cannot be changed then."""

    # -- internal

    async def _add(self, name: str, path: str) -> Entry:
        entry = Entry(name, path, next(self._numbers))
        entry.rank = await self._engine_load(entry)
        self._entries[name] = entry
        return entry

    async def _remove(self, entry: Entry) -> None:
        await self._engine_unload(entry)
        del self._entries[entry.name]

    async def _pin(self, entry: Entry) -> None:
        await self._engine_pin(entry)
        entry.pinned = True

    def _check_enabled(self) -> None:
        if not self._slots:
            raise NotReadyError(
                f"stage {self._stage} accepts no adapters; start it with the option enable_lora",
                reason="ADAPTERS_DISABLED",
            )

    def _find_loaded(self, name: str, path: str) -> Entry | None:
        """Returns the entry of the adapter if the adapter is already loaded, or None if it can be loaded now.

        Raises ExistsError if the name is used for another folder or the adapter is being unloaded, and OverloadedError
        if no further adapter can be loaded.
        """
        entry = self._entries.get(name)
        if entry is None:
            self._check_capacity(name)
        elif entry.path != path or entry.unloading:
            state = "is being unloaded" if entry.unloading else f"is loaded from {entry.path}"
            raise ExistsError(
                f"adapter {name!r} of stage {self._stage} {state}; unload it first, or use another name",
                reason="ADAPTER_EXISTS",
                metadata={"adapter": name},
            )
        return entry

    @property
    def _free_slots(self) -> int:
        return self._slots - sum(entry.reserved for entry in self._entries.values())

    def _sharing(self) -> set[str]:
        """Returns the names of the adapters that tasks use and that have no reserved slot."""
        return {entry.name for entry in self._entries.values() if entry.users and not entry.reserved}

    def _may_run(self, entry: Entry) -> bool:
        if entry.reserved or self._free_slots == self._slots:
            return True
        return len(self._sharing() | {entry.name}) <= self._free_slots

    def _usable(self, name: str) -> Entry:
        entry = self._entries.get(name)
        if entry is None:
            known = f"; loaded: {', '.join(sorted(self._entries)) or 'none'}"
            disabled = ": it was started without the option enable_lora"
            raise NotFoundError(
                f"stage {self._stage} has no adapter {name!r}{known if self._slots else disabled}",
                reason="UNKNOWN_ADAPTER",
                metadata={"adapter": name},
            )
        if entry.unloading:
            raise NotReadyError(
                f"adapter {name!r} of stage {self._stage} is being unloaded; choose another, or load it again",
                metadata={"adapter": name},
            )
        return entry

    def _check_capacity(self, name: str) -> None:
        if len(self._entries) >= self._capacity or not self._free_slots:
            limit = (
                f"{self._capacity} adapters, its {self._capacity_option}"
                if self._free_slots
                else "a pinned adapter in every slot"
            )
            raise OverloadedError(
                f"stage {self._stage} has {limit} ({', '.join(sorted(self._entries))}); unload one before {name!r}",
                reason="ADAPTERS_FULL",
                metadata={"adapter": name},
            )

    def _check_pin(self, entry: Entry) -> None:
        others = [each.name for each in self._entries.values() if not each.reserved and each is not entry]
        if others and not entry.reserved and self._free_slots <= 1:
            raise OverloadedError(
                f"stage {self._stage} has {self._slots} slots, its max_loras; "
                f"pinning {entry.name!r} would leave none for {', '.join(sorted(others))}",
                reason="ADAPTERS_FULL",
                metadata={"adapter": entry.name},
            )

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()
