"""The registry of an engine's loaded LoRA adapters: their slots, and the tasks that use them. Works with any engine."""

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from stagemesh.common.errors import (
    ExistsError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
)
from stagemesh.services.engines.abilities import Adapter

_NAME = re.compile(r"[A-Za-z0-9._:/-]{1,128}")


def check_name(name: str) -> None:
    """Raises InvalidRequestError if an adapter's name is not valid."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"an adapter's name is {name[:140]!r}; it must be 1 to 128 letters, digits, '.', '_', ':', '-' or '/'",
            reason="INVALID_ADAPTER",
        )


def disabled_error(stage: str) -> NotReadyError:
    """Returns the error for an operator who manages adapters of a stage that was started without adapters."""
    return NotReadyError(
        f"stage {stage} accepts no adapters; start it with the option enable_lora", reason="ADAPTERS_DISABLED"
    )


def unknown_adapter_error(stage: str, name: str) -> NotFoundError:
    """Returns the error for a task that names an adapter on a stage that was started without adapters."""
    return NotFoundError(
        f"stage {stage} has no adapter {name!r}: it was started without the option enable_lora",
        reason="UNKNOWN_ADAPTER",
        metadata={"adapter": name},
    )


def check_rank(name: str, rank: int, *, most: int, taker: str = "the stage") -> None:
    """Raises InvalidRequestError if an adapter's rank is above `most`.

    `taker` is the name for the stage in the error message.
    """
    if rank > most:
        raise InvalidRequestError(
            f"adapter {name!r} has rank {rank}; {taker} accepts a rank of at most {most}, its option max_lora_rank",
            reason="INVALID_ADAPTER",
        )


@dataclass
class Entry:
    """A loaded adapter and its state in the registry."""

    name: str
    path: str
    rank: int
    number: int
    """The adapter's id in the engine. The registry never reuses an id."""
    reserved: bool = False
    """Whether a slot is reserved for this adapter, because it is pinned or is waiting to be pinned."""
    pinned: bool = False
    """Whether the engine has pinned the adapter."""
    unloading: bool = False
    """Whether the adapter is being unloaded. No further task can use it."""
    users: int = 0
    """The number of running tasks that use the adapter."""

    @property
    def adapter(self) -> Adapter:
        """The adapter's description for operators."""
        return Adapter(self.name, self.path, self.rank, self.pinned, self.users)


@dataclass
class AdapterRegistry:
    """The registry of an engine's loaded adapters. Enforces limits that vLLM does not check itself.

    A step may use at most `slots` different adapters. vLLM's scheduler counts them, but assumes that it can evict a
    pinned adapter. A step that needs the slot of a pinned adapter crashes the engine. Therefore, while an adapter is
    pinned, the registry limits the other adapters in use to the number of remaining slots. At most `capacity` adapters
    are loaded, because vLLM would otherwise evict an adapter in use and read it again in the middle of a step.
    """

    stage: str
    slots: int
    capacity: int
    capacity_option: str = "max_cpu_loras"
    """The name of the stage option that sets `capacity`."""
    _entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    _last_number: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def list_adapters(self) -> Sequence[Adapter]:
        """Returns all adapters, sorted by name."""
        return [entry.adapter for _, entry in sorted(self._entries.items())]

    def entries(self) -> Sequence[Entry]:
        """Returns the entries of all loaded adapters, in the order of loading."""
        return list(self._entries.values())

    def find(self, name: str) -> Entry:
        """Returns the entry of a loaded adapter. Raises NotFoundError if no adapter with this name is loaded."""
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(sorted(self._entries)) or "none"
            raise NotFoundError(
                f"stage {self.stage} has no adapter {name!r}; loaded: {known}",
                reason="UNKNOWN_ADAPTER",
                metadata={"adapter": name},
            )
        return entry

    def find_loaded(self, name: str, path: str) -> Entry | None:
        """Returns the adapter's entry if it is already loaded, or None if it can be loaded now.

        Raises ExistsError if the name is used for another folder, and OverloadedError if the registry is full.
        """
        entry = self._entries.get(name)
        if entry is None:
            self._check_capacity(name)
        elif entry.path != path or entry.unloading:
            state = "is being unloaded" if entry.unloading else f"is loaded from {entry.path}"
            raise ExistsError(
                f"adapter {name!r} of stage {self.stage} {state}; unload it first, or use another name",
                reason="ADAPTER_EXISTS",
                metadata={"adapter": name},
            )
        return entry

    def next_number(self) -> int:
        """Returns an unused adapter id."""
        self._last_number += 1
        return self._last_number

    def add(self, entry: Entry) -> None:
        """Adds an adapter that the engine has loaded."""
        self._entries[entry.name] = entry

    def remove(self, entry: Entry) -> None:
        """Removes an adapter that the engine has unloaded."""
        del self._entries[entry.name]

    @asynccontextmanager
    async def using(self, name: str) -> AsyncGenerator[Entry]:
        """Waits for a slot and yields the adapter's entry. A task may use the adapter until the context exits.

        Raises NotFoundError if the adapter is not loaded, and NotReadyError if it is being unloaded.
        """
        await self._until(lambda: self._may_run(self._usable(name)))
        entry = self._usable(name)
        entry.users += 1
        try:
            yield entry
        finally:
            entry.users -= 1
            self._notify()

    @asynccontextmanager
    async def unloading(self, name: str, *, drain: bool) -> AsyncGenerator[Entry]:
        """Waits until no task uses the adapter and yields its entry. No task can use the adapter until the context
        exits.

        Raises NotFoundError if the adapter is not loaded, and NotReadyError if tasks use it and `drain` is False.
        """
        entry = self._usable(name)
        if entry.users and not drain:
            raise NotReadyError(
                f"adapter {name!r} of stage {self.stage} is used by {entry.users} requests; wait for them, or set "
                "drain so that the call waits",
                reason="ADAPTER_IN_USE",
                metadata={"adapter": name, "running": str(entry.users)},
            )
        entry.unloading = True
        try:
            await self._until(lambda: not entry.users)
            yield entry
        finally:
            entry.unloading = False
            self._notify()

    @asynccontextmanager
    async def pinning(self, name: str) -> AsyncGenerator[Entry]:
        """Reserves a slot for an adapter and yields its entry. The caller sets `pinned` after the engine has pinned it.

        The reservation ends when the context exits unless `pinned` is set. Waits until the number of other adapters in
        use is at most the number of remaining slots. Raises NotFoundError if the adapter is not loaded, and
        OverloadedError if no slot would remain for the other adapters.
        """
        entry = self._usable(name)
        self._check_pin(entry)
        entry.reserved = True
        try:
            await self._until(lambda: len(self._sharing()) <= self._free_slots)
            yield entry
        finally:
            entry.reserved = entry.pinned
            self._notify()

    # -- internal

    @property
    def _free_slots(self) -> int:
        return self.slots - sum(entry.reserved for entry in self._entries.values())

    def _sharing(self) -> set[str]:
        """Returns the names of the adapters in use that do not have a reserved slot."""
        return {entry.name for entry in self._entries.values() if entry.users and not entry.reserved}

    def _may_run(self, entry: Entry) -> bool:
        if entry.reserved or self._free_slots == self.slots:
            return True
        return len(self._sharing() | {entry.name}) <= self._free_slots

    def _usable(self, name: str) -> Entry:
        entry = self.find(name)
        if entry.unloading:
            raise NotReadyError(
                f"adapter {name!r} of stage {self.stage} is being unloaded; choose another, or load it again",
                metadata={"adapter": name},
            )
        return entry

    def _check_capacity(self, name: str) -> None:
        if len(self._entries) >= self.capacity or not self._free_slots:
            limit = (
                f"{self.capacity} adapters, its {self.capacity_option}"
                if self._free_slots
                else "a pinned adapter in every slot"
            )
            raise OverloadedError(
                f"stage {self.stage} has {limit} ({', '.join(sorted(self._entries))}); unload one before {name!r}",
                reason="ADAPTERS_FULL",
                metadata={"adapter": name},
            )

    def _check_pin(self, entry: Entry) -> None:
        others = [each.name for each in self._entries.values() if not each.reserved and each is not entry]
        if others and not entry.reserved and self._free_slots <= 1:
            raise OverloadedError(
                f"stage {self.stage} has {self.slots} slots, its max_loras; "
                f"pinning {entry.name!r} would leave none for {', '.join(sorted(others))}",
                reason="ADAPTERS_FULL",
                metadata={"adapter": entry.name},
            )

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
