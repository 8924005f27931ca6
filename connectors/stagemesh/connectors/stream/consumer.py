"""The consumer side of a replica: its expected flows, its producers, and the memory for fetched chunks."""

import asyncio
import hmac
import logging
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from copy import copy
from functools import partial
from typing import TypeAlias

from stagemesh.common.errors import (
    ExistsError,
    NotFoundError,
    NotReadyError,
    PermissionDeniedError,
    StagemeshError,
    StaleAttemptError,
)
from stagemesh.common.process.host import bulk_threads
from stagemesh.common.wire.versions import check_version
from stagemesh.connectors.arena.arena import Arena
from stagemesh.connectors.flow.flow_control import Credit
from stagemesh.connectors.flow.inlet_attempt import InletAttempt
from stagemesh.connectors.flow.received_rows import PacketQueue
from stagemesh.connectors.packets import EdgeKey
from stagemesh.connectors.stream.connector_agreement import ReplicaConnectors
from stagemesh.connectors.stream.producer_state import ProducerState
from stagemesh.rpc.credentials import PROCESS
from stagemesh.v1 import stage_pb2

REMEMBERED_FLOWS = 4096
"""The maximum number of committed flows whose keys are retained.

If a producer has missed the commit message of a retained flow, the consumer sends the message again.
"""

RunInBackground: TypeAlias = Callable[[Coroutine[object, object, object]], None]

_log = logging.getLogger(__name__)


class LandingArena:
    """The arena into which a consumer copies fetched chunks.

    The arena is created when it is first needed, to save startup time and memory.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._creating: asyncio.Future[Arena] | None = None

    @property
    def present(self) -> Arena | None:
        """The arena. None if it has not been created yet, or if its creation has failed."""
        made = self._creating
        return None if made is None or not made.done() or made.exception() else made.result()

    def request(self) -> Arena | None:
        """Returns the arena, or None if it does not exist yet. The first call starts to create the arena."""
        self._create()
        return self.present

    async def get(self) -> Arena:
        """Returns the arena. The first call creates the arena, and all calls wait until the arena exists.

        Raises NotReadyError if not enough memory is available.
        """
        return await asyncio.shield(self._create())

    async def close(self) -> None:
        """Waits until an unfinished creation of the arena has ended, and closes the arena. Idempotent."""
        if self._creating is not None:
            await asyncio.wait((self._creating,))
        if self.present is not None:
            self.present.close()

    def _create(self) -> asyncio.Future[Arena]:
        if self._creating is None:
            create = partial(Arena, self._size_bytes, shared=False)
            self._creating = asyncio.get_running_loop().run_in_executor(bulk_threads(), create)
            self._creating.add_done_callback(_log_failure)
        return self._creating


class Consumer:
    """The registry of the flows that a replica expects, and of the producers that have connected.

    All consumer sessions of the replica share the registry.
    """

    def __init__(
        self,
        identity: stage_pb2.Hello,
        *,
        connectors: ReplicaConnectors,
        landing: LandingArena,
        window_bytes: int,
        max_chunk_bytes: Callable[[], int],
        welcome: stage_pb2.Welcome,
        run_in_background: RunInBackground,
    ) -> None:
        """Creates an empty registry.

        Args:
            identity: The replica's identity. Only producers of the same pipeline and generation are admitted.
            connectors: The connectors of the replica.
            landing: The memory into which chunks are fetched.
            window_bytes: The credit window of each flow in bytes.
            max_chunk_bytes: Returns the maximum size of a chunk in bytes.
            welcome: The Welcome message without the ids of a producer's leases.
            run_in_background: Runs a coroutine in a background task.
        """
        self._identity, self._connectors = identity, connectors
        self.landing = landing
        """The memory into which chunks are fetched."""
        self._window_bytes, self._max_chunk_bytes = window_bytes, max_chunk_bytes
        self._welcome, self._run_in_background = welcome, run_in_background
        self._error: StagemeshError | None = None
        self._flows: dict[EdgeKey, InletAttempt] = {}
        self._newest: dict[tuple[str, str], int] = {}
        """The highest attempt of `_flows`, by request and edge."""
        self._committed: OrderedDict[EdgeKey, str] = OrderedDict()
        """The producers of committed flows."""
        self._producers: dict[tuple[str, str], ProducerState] = {}

    # -- flows

    @property
    def credit_bytes(self) -> int:
        """The number of payload bytes that all producers together may still send to this replica."""
        return sum(flow.credit_bytes for flow in self._flows.values())

    def expect(self, key: EdgeKey, packets: PacketQueue, *, producer: str) -> InletAttempt:
        """Registers a flow that is expected from `producer`, whose packets are added to `packets`.

        Raises ExistsError if the flow is already open.
        """
        if key in self._flows:
            raise ExistsError(f"edge {key.edge} of request {key.request_id} is open already", reason="FLOW_EXISTS")
        credit = Credit(self._window_bytes, max_chunk_bytes=self._max_chunk_bytes())
        flow = InletAttempt(key, packets, producer=producer, credit=credit, on_closed=self._forget)
        self._flows[key] = flow
        self._newest[key[:2]] = max(key.attempt, self._newest.get(key[:2], 0))
        # The same request may be sent again a long time after it has ended.
        self._committed.pop(key, None)
        return flow

    def is_committed(self, key: EdgeKey, producer: ProducerState) -> bool:
        """Returns whether the flow that `producer` has sent under this key was read to its end."""
        return self._committed.get(key) == producer.replica

    def expected(self, key: EdgeKey, producer: ProducerState) -> InletAttempt:
        """Returns the flow that `producer` sends under the key `key`.

        Raises NotFoundError (UNKNOWN_FLOW) if this replica does not expect the flow from `producer`. Raises
        StaleAttemptError if a later attempt has replaced the flow, or if the flow belongs to another incarnation of the
        producer. Raises the flow's error if the flow has failed.
        """
        flow = self._flows.get(key)
        if flow is None or flow.producer != producer.replica:
            if key.attempt < self._newest.get(key[:2], 0):
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
        """Ends every expected flow with `error`. Rejects each producer that connects later with the same error."""
        self._error = error
        for flow in list(self._flows.values()):
            flow.fail(error)

    # -- producers

    def admit(self, hello: stage_pb2.Hello) -> ProducerState:
        """Returns the state of the producer that has sent `hello`.

        Fails the flows of the producer's earlier incarnations, and removes other producers that use nothing. Raises
        NotReadyError if the producer has no wire version in common with this replica, or belongs to another pipeline or
        generation. If `fail_all` was called before, raises the error that was passed to `fail_all`.
        """
        if self._error is not None:
            raise copy(self._error)
        check_version(hello.protocol, peer=f"producer {hello.replica}", own_name=f"consumer {self._identity.replica}")
        _check_same("pipeline", hello.pipeline, self._identity.pipeline, reason="WRONG_PIPELINE")
        _check_same("generation", hello.generation, self._identity.generation, reason="WRONG_GENERATION")
        key = hello.replica, hello.incarnation
        reading = {(flow.producer, flow.incarnation) for flow in self._flows.values()}
        for other, producer in list(self._producers.items()):
            is_former = producer.replica == hello.replica and producer.incarnation != hello.incarnation
            is_used = other == key or other in reading or producer.streams or producer.held_lease_ids
            if is_former or not is_used:
                self.lose(producer)
        if key not in self._producers:
            self._producers[key] = ProducerState(*key, self._connectors)
        return self._producers[key]

    def check_local(self, hello: stage_pb2.Hello) -> None:
        """Checks that a local stream, which has no certificate, belongs to the producer that its `hello` names.

        Raises PermissionDeniedError (REPLICA_MISMATCH) if this process has certificates, and `hello` does not contain
        the secret that the producer has received over its authenticated stream.
        """
        producer = self._producers.get((hello.replica, hello.incarnation))
        is_known = producer is not None and hmac.compare_digest(producer.local_secret, hello.local_secret)
        if not is_known and PROCESS.credentials.tls is not None:
            raise PermissionDeniedError(
                f"a local stream of replica {hello.replica!r} lacks the secret of this replica's Welcome; connect over "
                "gRPC first, and send its local_secret in Hello",
                reason="REPLICA_MISMATCH",
                metadata={"replica": hello.replica},
            )

    def welcome(self, producer: ProducerState) -> stage_pb2.Welcome:
        """Returns the Welcome message that answers a producer's Hello.

        The message contains the ids of the producer's leases that are still in use.
        """
        welcome = stage_pb2.Welcome(held_lease_ids=sorted(producer.held_lease_ids), local_secret=producer.local_secret)
        welcome.MergeFrom(self._welcome)
        return welcome

    def lose(self, producer: ProducerState) -> None:
        """Removes the state of a producer's process that has terminated, and fails the flows from this process."""
        self._producers.pop((producer.replica, producer.incarnation), None)
        self._run_in_background(producer.close())
        for flow in list(self._flows.values()):
            if flow.producer == producer.replica and flow.incarnation == producer.incarnation:
                flow.fail(flow.lost_error())

    async def close(self) -> None:
        """Closes and removes all producer states. Idempotent."""
        for producer in list(self._producers.values()):
            await producer.close()
        self._producers.clear()

    # -- inner workings

    def _forget(self, flow: InletAttempt) -> None:
        del self._flows[flow.key]
        if self._newest.get(flow.key[:2]) == flow.key.attempt:
            del self._newest[flow.key[:2]]
        if flow.is_read:
            self._committed[flow.key] = flow.producer
            if len(self._committed) > REMEMBERED_FLOWS:
                self._committed.popitem(last=False)


def _log_failure(creating: asyncio.Future[Arena]) -> None:
    if not creating.cancelled() and creating.exception() is not None:
        _log.warning("chunks that arrive as fragments use newly allocated memory: %s", creating.exception())


def _check_same(what: str, theirs: str, ours: str, *, reason: str) -> None:
    if theirs != ours:
        raise NotReadyError(
            f"the producer serves {what} {theirs!r}, but this replica serves {ours!r}; deploy both from one pipeline "
            "file",
            reason=reason,
        )
