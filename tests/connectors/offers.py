"""Tickets that a test offers, and flows that carry them."""

from dataclasses import dataclass, field

import numpy as np

from stagemesh.common.plugins.connectors import AUTO, ConnectorName
from stagemesh.common.wire.chunk_sizes import ChunkPolicy, StepPolicy
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.outlet import Outlet
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, OfferedTicket, Packet, Ticket
from tests.connectors.hosts import Host

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


def open_ticket_flow(
    producer: Host,
    consumer: Host,
    *,
    request: str = "r",
    attempt: int = 1,
    connector: ConnectorName = AUTO,
    endpoint: str = "",
    policy: ChunkPolicy | None = None,
    rebind_s: float = 0.0,
    kinds: tuple[str, ...] = (KIND,),
) -> tuple[Outlet, Inlet]:
    """Opens a flow whose reader accepts tickets of `kinds`."""
    key = EdgeKey(request, "a->b", attempt)
    inlet = consumer.plane.open_inlet(key, producer=producer.replica, ticket_kinds=kinds, rebind_s=rebind_s)
    outlet = producer.plane.open_outlet(
        key,
        ConsumerAddress(consumer.replica, endpoint or consumer.endpoint),
        connector=connector,
        policy=policy or StepPolicy(),
        rebind_s=rebind_s,
    )
    return outlet, inlet


async def take(inlet: Inlet, name: str = "kv") -> Ticket:
    """Returns the ticket of the next packet, which is not referenced any more."""
    return (await anext(aiter(inlet))).tickets[name]
