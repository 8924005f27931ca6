"""The consumer side of a replica: its expected flows, its known producers, and the memory for fetched chunks."""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from copy import copy
from typing import TypeAlias

from stagemesh.common.errors import ExistsError, NotFoundError, NotReadyError, StagemeshError, StaleAttemptError
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.edge import EdgeKey
from stagemesh.connectors.flow.inlet import Inlet, InletAttempt
from stagemesh.connectors.flow.packet_queue import Credit, PacketQueue
from stagemesh.connectors.replica_connectors import ReplicaConnectors
from stagemesh.connectors.stream.producer_state import ProducerState
from stagemesh.v1 import stage_pb2

REMEMBERED_FLOWS = 4096
"""The number of committed flows whose keys are retained to answer producers that have missed the commit."""

RunInBackground: TypeAlias = Callable[[Coroutine[object, object, object]], None]

_log = logging.getLogger(__name__)


class LandingArena:
    """The memory into which chunks are fetched. Created when first needed, to save startup time and memory."""

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._creating: asyncio.Task[Arena] | None = None

    @property
    def present(self) -> Arena | None:
        """The arena, or None if it has not been created."""
        task = self._creating
        return None if task is None or not task.done() or task.exception() else task.result()

    @property
    def is_requested(self) -> bool:
        """Whether the arena exists or is being created."""
        return self._creating is not None

    async def get(self) -> Arena:
        """Returns the arena, and creates it on the first call. Raises NotReadyError if there is not enough memory."""
        if self._creating is None:
            self._creating = asyncio.create_task(asyncio.to_thread(Arena, self._size_bytes, shared=False))
        return await asyncio.shield(self._creating)

    async def close(self) -> None:
        """Closes the arena. Idempotent."""
        if self._creating is not None:
            await asyncio.wait((self._creating,))
        if self.present is not None:
            self.present.close()


class Consumer:
    """The registry of a replica's expected flows and of its producers, which the consumer sessions use."""

    def __init__(
        self,
        identity: stage_pb2.Hello,
        *,
        connectors: ReplicaConnectors,
        landing: LandingArena,
        window_bytes: int,
        max_chunk_bytes: Callable[[], int],
        inline_limit_bytes: int,
        local_socket: str,
        run_in_background: RunInBackground,
    ) -> None:
        """Stores the replica's identity and limits.

        `local_socket` is the name of the socket of the replica's LocalListener.
        """
        self._identity, self._connectors, self._landing = identity, connectors, landing
        self._window_bytes, self._max_chunk_bytes = window_bytes, max_chunk_bytes
        self._inline_limit_bytes, self._local_socket = inline_limit_bytes, local_socket
        self._run_in_background = run_in_background
        self._flows: dict[EdgeKey, InletAttempt] = {}
        self._committed: OrderedDict[EdgeKey, None] = OrderedDict()
        self._producers: dict[tuple[str, str], ProducerState] = {}

    # -- flows

    @property
    def credit_bytes(self) -> int:
        """The number of payload bytes that all producers together may still send to this replica."""
        return sum(flow.credit_bytes for flow in self._flows.values())

    def open(self, key: EdgeKey, *, producer: str, rebind_s: float) -> Inlet:
        """Expects a flow from `producer` and returns its inlet. Raises ExistsError if the flow is already open."""
        return Inlet(self._expect(key, producer, PacketQueue(edge=key.edge)), rebind_s=rebind_s)

    def rebind(self, inlet: Inlet, key: EdgeKey, *, producer: str, first_rows: Mapping[str, int]) -> None:
        """Continues `inlet` with a flow from another producer.

        `first_rows` maps each tensor's name to the first row that this producer sends.
        """
        former = inlet.attempt
        former.supersede(StaleAttemptError(f"edge {former.key.edge} has another producer"))
        inlet.rebind(self._expect(key, producer, former.packets), first_rows=first_rows)

    def find(self, key: EdgeKey) -> InletAttempt | None:
        """Returns the expected flow with this key, or None if no such flow is expected."""
        return self._flows.get(key)

    def is_committed(self, key: EdgeKey) -> bool:
        """Returns whether the flow with this key was read to its end."""
        return key in self._committed

    def expected(self, key: EdgeKey, producer: ProducerState) -> InletAttempt:
        """Returns the flow with this key.

        Raises an error if `producer` may not send the flow or if the flow has failed.
        """
        flow = self._flows.get(key)
        if flow is None or flow.producer != producer.replica:
            if any(key.attempt < other.attempt for other in self._flows if other[:2] == key[:2]):
                raise StaleAttemptError(f"attempt {key.attempt} of edge {key.edge} has been replaced")
            raise NotFoundError(
                f"request {key.request_id} expects nothing from {producer.replica} on edge {key.edge}",
                reason="UNKNOWN_FLOW",
            )
        if flow.incarnation not in {"", producer.incarnation}:
            raise StaleAttemptError(
                f"edge {key.edge} belongs to another incarnation of {flow.producer}", reason="STALE_INCARNATION"
            )
        if flow.error is not None:
            raise copy(flow.error)
        return flow

    def fail_all(self, error: StagemeshError) -> None:
        """Ends every expected flow with an error."""
        for flow in list(self._flows.values()):
            flow.fail(error)

    # -- producers

    def admit(self, hello: stage_pb2.Hello) -> ProducerState:
        """Returns the state of the producer that has sent `hello`. Fails the flows of its earlier incarnations.

        Raises NotReadyError if the producer belongs to another pipeline or generation.
        """
        _check_same("pipeline", hello.pipeline, self._identity.pipeline)
        _check_same("generation", hello.generation, self._identity.generation)
        for producer in list(self._producers.values()):
            if producer.replica == hello.replica and producer.incarnation != hello.incarnation:
                self.lose(producer)
        key = hello.replica, hello.incarnation
        if key not in self._producers:
            self._producers[key] = ProducerState(*key, self._connectors)
        return self._producers[key]

    def welcome(self, producer: ProducerState) -> stage_pb2.Welcome:
        """Returns the Welcome message, which answers a producer's Hello."""
        return stage_pb2.Welcome(
            replica=self._identity.replica,
            incarnation=self._identity.incarnation,
            inline_limit_bytes=self._inline_limit_bytes,
            held_lease_ids=sorted(producer.held_lease_ids),
            local_socket=self._local_socket,
        )

    def lose(self, producer: ProducerState) -> None:
        """Removes an incarnation of a producer that has terminated, and fails its flows."""
        self._producers.pop((producer.replica, producer.incarnation), None)
        self._run_in_background(producer.close())
        for flow in list(self._flows.values()):
            if flow.producer == producer.replica and flow.incarnation == producer.incarnation:
                flow.fail(flow.lost_error())

    def landing(self) -> Arena | None:
        """Returns the memory for chunks that arrive as fragments, or None if that memory is not available yet."""
        if not self._landing.is_requested:
            self._run_in_background(self._create_landing())
        return self._landing.present

    async def close(self) -> None:
        """Closes and removes all producer states. Idempotent."""
        for producer in list(self._producers.values()):
            await producer.close()
        self._producers.clear()

    # -- inner workings

    def _expect(self, key: EdgeKey, producer: str, packets: PacketQueue) -> InletAttempt:
        if key in self._flows:
            raise ExistsError(f"edge {key.edge} of request {key.request_id} is open already", reason="FLOW_EXISTS")
        credit = Credit(self._window_bytes, max_chunk_bytes=self._max_chunk_bytes())
        flow = InletAttempt(key, packets, producer=producer, credit=credit, on_closed=self._forget)
        self._flows[key] = flow
        # The same request may be sent again a long time after it has ended.
        self._committed.pop(key, None)
        return flow

    def _forget(self, flow: InletAttempt) -> None:
        del self._flows[flow.key]
        if flow.is_read:
            self._committed[flow.key] = None
            if len(self._committed) > REMEMBERED_FLOWS:
                self._committed.popitem(last=False)

    async def _create_landing(self) -> None:
        try:
            await self._landing.get()
        except StagemeshError as exc:
            _log.warning("chunks that arrive as fragments use newly allocated memory: %s", exc.message)


def _check_same(what: str, theirs: str, ours: str) -> None:
    if theirs != ours:
        raise NotReadyError(
            f"the producer serves {what} {theirs!r}, but this replica serves {ours!r}; deploy both from one pipeline "
            "file",
            reason=f"WRONG_{what.upper()}",
        )
