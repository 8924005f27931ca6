"""Which adapters an engine has, who uses them, and who must wait for a slot. Knows nothing of any engine."""

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
    """Raises InvalidRequestError for what an adapter cannot be called."""
    if not _NAME.fullmatch(name):
        raise InvalidRequestError(
            f"an adapter's name is {name[:140]!r}; it must be 1 to 128 letters, digits, '.', '_', ':', '-' or '/'",
            reason="INVALID_ADAPTER",
        )


def disabled(stage: str) -> NotReadyError:
    """For a stage that was started without adapters."""
    return NotReadyError(
        f"stage {stage} takes no adapters; start it with the option enable_lora", reason="ADAPTERS_DISABLED"
    )


def unknown_where_disabled(stage: str, name: str) -> NotFoundError:
    """The same, for a task that names one."""
    return NotFoundError(
        f"stage {stage} has no adapter {name!r}: it was started without the option enable_lora",
        reason="UNKNOWN_ADAPTER",
        metadata={"adapter": name},
    )


def check_rank(name: str, rank: int, *, most: int, taker: str = "the stage") -> None:
    """Raises InvalidRequestError for an adapter that is larger than a stage takes."""
    if rank > most:
        raise InvalidRequestError(
            f"adapter {name!r} has rank {rank}; {taker} takes {most} at most, its option max_lora_rank",
            reason="INVALID_ADAPTER",
        )


@dataclass
class Entry:
    """An adapter as the engine holds it."""

    name: str
    path: str
    rank: int
    number: int
    """Its id in the engine, which no other adapter has had."""
    pinned: bool = False
    """Its slot is its own: it has it, or waits for it."""
    held: bool = False
    """The engine has pinned it."""
    leaving: bool = False
    """Being unloaded: it takes no new users."""
    users: int = 0

    @property
    def public(self) -> Adapter:
        """As others see it."""
        return Adapter(self.name, self.path, self.rank, self.held, self.users)


@dataclass
class AdapterRegistry:
    """Keeps an engine's limits, which vLLM does not all check itself.

    A step may use `slots` different adapters. vLLM's scheduler counts them, but takes a pinned one for one that gives
    way, and a step that needs its slot kills the engine. So as long as one is pinned, tasks enter here, as many
    adapters at a time as there are slots left. No more than `room` are ever loaded, for vLLM would drop one that is in
    use, and read it from its folder again in the middle of a step.
    """

    stage: str
    slots: int
    room: int
    room_option: str = "max_cpu_loras"
    """What the option is called that sets `room`."""
    _entries: dict[str, Entry] = field(default_factory=dict[str, Entry])
    _last_number: int = 0
    _changed: asyncio.Event = field(default_factory=asyncio.Event)

    def listed(self) -> Sequence[Adapter]:
        """All, by name."""
        return [entry.public for _, entry in sorted(self._entries.items())]

    def entries(self) -> Sequence[Entry]:
        """All, in the order of their loading."""
        return list(self._entries.values())

    def find(self, name: str) -> Entry:
        """Raises NotFoundError with the names that are known."""
        entry = self._entries.get(name)
        if entry is None:
            known = ", ".join(sorted(self._entries)) or "none"
            raise NotFoundError(
                f"stage {self.stage} has no adapter {name!r}; loaded: {known}",
                reason="UNKNOWN_ADAPTER",
                metadata={"adapter": name},
            )
        return entry

    def loaded(self, name: str, path: str) -> Entry | None:
        """The adapter of this name; raises ExistsError where it is another, OverloadedError where none more fits."""
        entry = self._entries.get(name)
        if entry is None:
            self._check_room(name)
        elif entry.path != path or entry.leaving:
            state = "is being unloaded" if entry.leaving else f"is loaded from {entry.path}"
            raise ExistsError(
                f"adapter {name!r} of stage {self.stage} {state}; unload it first, or use another name",
                reason="ADAPTER_EXISTS",
                metadata={"adapter": name},
            )
        return entry

    def number(self) -> int:
        """A new id."""
        self._last_number += 1
        return self._last_number

    def add(self, entry: Entry) -> None:
        """Enters an adapter that the engine has loaded."""
        self._entries[entry.name] = entry

    def remove(self, entry: Entry) -> None:
        """Strikes one out that the engine has dropped."""
        del self._entries[entry.name]

    @asynccontextmanager
    async def using(self, name: str) -> AsyncGenerator[Entry]:
        """The adapter for a task, which may use it within the context; waits for a slot.

        Raises NotFoundError, and NotReadyError while it is being unloaded.
        """
        await self._until(lambda: self._may_run(self._usable(name)))
        entry = self._usable(name)
        entry.users += 1
        try:
            yield entry
        finally:
            entry.users -= 1
            self._tell()

    @asynccontextmanager
    async def leaving(self, name: str, *, drain: bool) -> AsyncGenerator[Entry]:
        """An adapter that nobody uses, nor comes to use within the context; waits for its users to end.

        Raises NotFoundError, and NotReadyError where it has users and is not to be drained.
        """
        entry = self._usable(name)
        if entry.users and not drain:
            raise NotReadyError(
                f"adapter {name!r} of stage {self.stage} is used by {entry.users} requests; wait for them, or have "
                "the call drain them",
                reason="ADAPTER_IN_USE",
                metadata={"adapter": name, "running": str(entry.users)},
            )
        entry.leaving = True
        try:
            await self._until(lambda: not entry.users)
            yield entry
        finally:
            entry.leaving = False
            self._tell()

    @asynccontextmanager
    async def pinning(self, name: str) -> AsyncGenerator[Entry]:
        """An adapter that is given a slot to itself, and keeps it once the engine holds it there.

        Waits for tasks that use more of the others than there are slots left. Raises NotFoundError, and OverloadedError
        where the others would have none.
        """
        entry = self._usable(name)
        self._check_pin(entry)
        entry.pinned = True
        try:
            await self._until(lambda: len(self._sharing()) <= self._free_slots)
            yield entry
        finally:
            entry.pinned = entry.held
            self._tell()

    # -- inner workings

    @property
    def _free_slots(self) -> int:
        return self.slots - sum(entry.pinned for entry in self._entries.values())

    def _sharing(self) -> set[str]:
        """The adapters in use that are not pinned."""
        return {entry.name for entry in self._entries.values() if entry.users and not entry.pinned}

    def _may_run(self, entry: Entry) -> bool:
        if entry.pinned or self._free_slots == self.slots:
            return True
        return len(self._sharing() | {entry.name}) <= self._free_slots

    def _usable(self, name: str) -> Entry:
        entry = self.find(name)
        if entry.leaving:
            raise NotReadyError(
                f"adapter {name!r} of stage {self.stage} is being unloaded; choose another, or load it again",
                metadata={"adapter": name},
            )
        return entry

    def _check_room(self, name: str) -> None:
        if len(self._entries) >= self.room or not self._free_slots:
            limit = (
                f"{self.room} adapters, its {self.room_option}"
                if self._free_slots
                else "a pinned adapter in every slot"
            )
            raise OverloadedError(
                f"stage {self.stage} holds {limit} ({', '.join(sorted(self._entries))}); unload one before {name!r}",
                reason="ADAPTERS_FULL",
                metadata={"adapter": name},
            )

    def _check_pin(self, entry: Entry) -> None:
        others = [each.name for each in self._entries.values() if not each.pinned and each is not entry]
        if others and not entry.pinned and self._free_slots <= 1:
            raise OverloadedError(
                f"stage {self.stage} has {self.slots} slots, its max_loras; {entry.name!r} pinned would leave none for "
                f"{', '.join(sorted(others))}",
                reason="ADAPTERS_FULL",
                metadata={"adapter": entry.name},
            )

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            await self._changed.wait()

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
