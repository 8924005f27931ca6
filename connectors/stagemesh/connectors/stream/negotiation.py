"""Negotiates the connectors of a connection. A flow uses the best connector that both replicas can use.

The producer offers its arena through one connector at a time, best first. The consumer answers whether it can read the
arena through this connector. If a connector that has worked before fails or is rejected, the producer offers the
connector again after a pause.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from stagemesh.common.connector_descriptors import AUTO, GRPC, ConnectorName, descriptors, name_of, number_of
from stagemesh.common.errors import InternalError, NotReadyError, StagemeshError
from stagemesh.connectors.base import Connector
from stagemesh.connectors.replica_connectors import ReplicaConnectors
from stagemesh.connectors.stream import wire
from stagemesh.v1 import stage_pb2

_OFFER_AGAIN_S = 2.0
_PAUSE_S = 5.0
"""The number of seconds after which a rejected connector that has worked before is offered again."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EdgeProbe:
    """The result of a negotiation without a flow: the connector that an edge between two replicas would use."""

    connector: ConnectorName
    refusals: Mapping[ConnectorName, StagemeshError]
    """The better connectors that cannot be used, each with the error that explains why. May be empty."""


class Negotiation:
    """Negotiates the connectors of one connection. Use it only on the event loop.

    Sends items through `offer`, and calls `on_negotiated` whenever a connector has become usable or has been rejected.
    """

    def __init__(
        self,
        connectors: ReplicaConnectors,
        *,
        consumer: str,
        offer: Callable[[stage_pb2.PutItem], None],
        on_negotiated: Callable[[], None],
    ) -> None:
        self._connectors = connectors
        self._consumer = consumer
        self._offer, self._on_negotiated = offer, on_negotiated
        self._negotiated: dict[ConnectorName, Connector] = {}
        self._refused: dict[ConnectorName, StagemeshError] = {}
        self._offering: dict[ConnectorName, asyncio.Task[None]] = {}
        self.worked: set[ConnectorName] = set()
        """The connectors that were negotiated with this consumer over this or an earlier connection."""
        self._paused: dict[ConnectorName, asyncio.TimerHandle] = {}

    def choose(self, wanted: ConnectorName) -> ConnectorName | None:
        """Returns the connector for a flow, or None while the connector is being negotiated.

        `wanted` is the requested connector or AUTO. Raises NotReadyError (CONNECTOR_UNAVAILABLE) if the requested
        connector cannot be used.
        """
        for name in self._candidates(wanted):
            if name == GRPC or name in self._negotiated:
                return name
            if name not in self._refused:
                self._begin(name)
                return None
        if wanted in self._paused:
            return None
        raise NotReadyError(
            f"connector {wanted} cannot be used with replica {self._consumer}: {self._refused[wanted].message}; "
            "fix that, or set `connector: auto`",
            reason="CONNECTOR_UNAVAILABLE",
        ) from self._refused[wanted]

    def reader(self, name: ConnectorName) -> Connector | None:
        """Returns this replica's instance of a negotiated connector, or None for grpc."""
        return self._negotiated.get(name)

    def answer(self, meeting: stage_pb2.Meeting) -> None:
        """Processes the consumer's answer to an offer. Ignores an answer to an offer that is not pending."""
        name = next((name for name in self._offering if number_of(name) == meeting.connector), None)
        if name is None:
            return
        self._offering.pop(name).cancel()
        if meeting.HasField("error"):
            self._refuse(name, wire.error_from_wire(meeting.error))
        else:
            self._negotiated[name] = self._connectors.get(name)
            self.worked.add(name)
        self._on_negotiated()

    def fail(self, name: ConnectorName, error: StagemeshError) -> None:
        """Stops using a negotiated connector that has failed with `error`."""
        if self._negotiated.pop(name, None) is not None:
            self._refuse(name, error)

    def probe(self, wanted: ConnectorName) -> EdgeProbe | None:
        """Returns the result of `choose` together with the better connectors that were rejected.

        Returns None while the connector is being negotiated. Raises NotReadyError under the same conditions as
        `choose`.
        """
        chosen = self.choose(wanted)
        if chosen is None:
            return None
        better = {name: self._refused[name] for name in self._candidates(wanted) if name in self._refused}
        return EdgeProbe(chosen, better)

    async def close(self) -> None:
        """Cancels all pending offers, including offers to be repeated after a pause. Idempotent."""
        for pause in self._paused.values():
            pause.cancel()
        tasks = list(self._offering.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # -- inner workings

    @staticmethod
    def _candidates(wanted: ConnectorName) -> Iterator[ConnectorName]:
        yield from descriptors() if wanted == AUTO else (wanted,)

    def _refuse(self, name: ConnectorName, error: StagemeshError) -> None:
        self._refused[name] = error
        if name in self.worked:
            # A temporary failure, such as a short network outage, may end soon. Flows that request this connector wait.
            self._paused[name] = asyncio.get_running_loop().call_later(_PAUSE_S, self._end_pause, name)

    def _end_pause(self, name: ConnectorName) -> None:
        del self._paused[name], self._refused[name]
        self._on_negotiated()

    def _begin(self, name: ConnectorName) -> None:
        if name not in self._offering:
            self._offering[name] = asyncio.create_task(self._keep_offering(name), name=f"offer {name}")

    def _cannot_offer(self, name: ConnectorName, error: StagemeshError) -> None:
        del self._offering[name]
        self._refuse(name, error)
        self._on_negotiated()

    async def _keep_offering(self, name: ConnectorName) -> None:
        """Sends an offer repeatedly, because it may be lost. The answer to the offer cancels this task."""
        try:
            offer = await self._connectors.get(name).offer()
        except StagemeshError as exc:
            self._cannot_offer(name, exc)
            return
        except Exception as exc:  # noqa: BLE001 - the task's outermost edge, and the connector may be an installed one
            _log.exception("connector %s failed with an unexpected error", name)
            self._cannot_offer(name, InternalError(f"connector {name} failed: {type(exc).__name__}: {exc}"))
            return
        item = stage_pb2.PutItem(offer=stage_pb2.Offer(connector=number_of(name), offer=offer))
        while True:
            self._offer(item)
            await asyncio.sleep(_OFFER_AGAIN_S)


def probe_to_wire(probe: EdgeProbe) -> stage_pb2.ProbeEdgeResponse:
    """Converts an EdgeProbe to its protobuf message."""
    return stage_pb2.ProbeEdgeResponse(
        connector=number_of(probe.connector),
        refusals=[
            stage_pb2.ConnectorRefusal(connector=number_of(name), error=wire.error_to_wire(error))
            for name, error in probe.refusals.items()
        ],
    )


def probe_from_wire(message: stage_pb2.ProbeEdgeResponse) -> EdgeProbe:
    """Converts a protobuf message to an EdgeProbe. Raises InvalidRequestError if a connector is unknown."""
    refusals = {name_of(refusal.connector): wire.error_from_wire(refusal.error) for refusal in message.refusals}
    return EdgeProbe(name_of(message.connector), refusals)
