"""Tickets that a test offers, and flows that carry them."""

from dataclasses import dataclass, field
from functools import partial

import numpy as np

from stagemesh.conformance import open_flow
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import OfferedTicket, Packet, Ticket

KIND = "test.state"
LIMIT_S = 30.0


@dataclass
class Offers:
    """The tickets of a producer's engine. `released` lists each release of a state."""

    released: list[str] = field(default_factory=list[str])

    def offer(self, name: str = "kv", *, time_limit_s: float = LIMIT_S, kind: str = KIND) -> OfferedTicket:
        """Returns a ticket with the name as its descriptor. The caller has one reference."""
        return OfferedTicket(
            kind,
            name.encode(),
            size_bytes=1 << 30,
            time_limit_s=time_limit_s,
            on_release=lambda: self.released.append(name),
        )

    async def send(self, outlet: Outlet, *names: str, time_limit_s: float = LIMIT_S) -> None:
        """Sends one packet with a small tensor and a ticket for each name, as an engine's step does."""
        tickets = {name: self.offer(name, time_limit_s=time_limit_s) for name in names or ("kv",)}
        try:
            await outlet.send(Packet({"first_token": np.array([7], np.int32)}, {"step": 0}, tickets))
        finally:
            for ticket in tickets.values():
                ticket.release()


open_ticket_flow = partial(open_flow, ticket_kinds=(KIND,))
"""Opens a flow as `open_flow` does. Its reader accepts tickets of KIND unless the caller names other kinds."""


async def take(inlet: Inlet, name: str = "kv") -> Ticket:
    """Returns the ticket of the next packet, which is not referenced any more."""
    return (await anext(aiter(inlet))).tickets[name]
