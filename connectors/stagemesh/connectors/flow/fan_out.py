"""Several flows that carry the same packets: written into the arena once, read by as many consumers as there are."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import TypeAlias

from stagemesh.common.errors import StagemeshError
from stagemesh.connectors.arena.arena import Arena, MemoryAccount
from stagemesh.connectors.edge import FlowStatus, FlowUsage, Outlet, Packet

Select: TypeAlias = Callable[[Packet], Packet | None]
"""The part of a packet that an outlet carries; None for none of it."""


class FanOut:
    """The outlets of one stage's share of a request, which may be none."""

    def __init__(self, *, arena: Arena, inline_limit_bytes: int) -> None:
        self._outlets: dict[Outlet, Select] = {}
        self._arena, self._account = arena, MemoryAccount()
        self._inline_limit_bytes = inline_limit_bytes

    def add(self, outlet: Outlet, select: Select = lambda packet: packet) -> None:
        """One more, which carries what `select` picks out of a packet."""
        self._outlets[outlet] = select

    @property
    def usages(self) -> tuple[FlowUsage, ...]:
        """What was sent, by outlet."""
        return tuple(outlet.usage for outlet in self._outlets)

    @property
    def standings(self) -> tuple[FlowStatus, ...]:
        """Where each outlet stands now."""
        return tuple(outlet.standing for outlet in self._outlets)

    async def send(self, packet: Packet) -> None:
        """Hands a packet to every outlet; raises what broke the first of them that breaks."""
        picked = self._picked(packet)
        if len(picked) > 1 and packet.size_bytes > self._inline_limit_bytes:
            names = {name for _, part in picked for name in part.tensors}
            picked = self._picked(await self._placed(_only(packet, names)))
        await _together([outlet.send(part) for outlet, part in picked])

    async def finish(self) -> None:
        """See `Outlet`, for all."""
        await _together([outlet.finish() for outlet in self._outlets])

    async def abort(self, error: StagemeshError) -> None:
        """See `Outlet`, for all."""
        await asyncio.gather(*(outlet.abort(error) for outlet in self._outlets))

    def _picked(self, packet: Packet) -> list[tuple[Outlet, Packet]]:
        """Who carries what of a packet."""
        picked = [(outlet, select(packet)) for outlet, select in self._outlets.items()]
        return [(outlet, part) for outlet, part in picked if part is not None]

    async def _placed(self, packet: Packet) -> Packet:
        """The packet in the arena, in a region that lives as long as a tensor of it or a chunk cut from one."""
        if all(self._arena.find(tensor) for tensor in packet.tensors.values() if tensor.nbytes):
            return packet
        written = await self._arena.write(packet.tensors, self._account)
        return Packet(written.held(), packet.metadata)


def _only(packet: Packet, names: Collection[str]) -> Packet:
    return Packet({name: tensor for name, tensor in packet.tensors.items() if name in names}, packet.metadata)


async def _together(steps: Sequence[Coroutine[object, object, None]]) -> None:
    """Runs all to their ends; the first error cancels the others and is raised as it is."""
    if len(steps) < 2:
        for step in steps:
            await step
        return
    try:
        async with asyncio.TaskGroup() as group:
            for step in steps:
                group.create_task(step)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
