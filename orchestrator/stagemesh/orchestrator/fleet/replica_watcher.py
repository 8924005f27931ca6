"""One address at which a replica serves: who is there, and whether they still are."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import Protocol

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.orchestrator.config import ReplicaAddress
from stagemesh.orchestrator.fleet.replica import Replica, ReplicaState
from stagemesh.orchestrator.fleet.replica_connection import Connection
from stagemesh.orchestrator.fleet.stage_client import REPLICA_LOST
from stagemesh.v1 import stage_pb2

_log = logging.getLogger(__name__)

_DESCRIBE_TIMEOUT_S = 2.0
_FIRST_PAUSE_S, _LOADING_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 0.5, 2.0
_LOAD_AGAIN_S = 1.0
GIVE_UP_S = 15.0
"""A replica that is out of reach for so long has ended, for all that we know."""


class WatcherOwner(Protocol):
    """Whoever keeps the replicas."""

    def admit(self, replica: Replica, said: stage_pb2.DescribeResponse) -> None:
        """The replica says what it is; `observe` is to be told."""

    def succeed(self, replica: Replica, successor: Replica | None) -> None:
        """A replica is no longer at its address: its process started anew, or it has left."""


class ReplicaWatcher:
    """Watches one address, from `keep` until it is told to `leave` and no request of ours runs there."""

    def __init__(
        self, address: ReplicaAddress, connection: Connection, make: Callable[[], Replica], seats: WatcherOwner
    ) -> None:
        self.address = address
        self._connection, self._make, self._seats = connection, make, seats
        self._left = asyncio.Event()
        self._tasks = asyncio.TaskGroup()
        self._loads: asyncio.Task[None] | None = None
        """Follows the replica's load while the replica answers, in every state."""
        self._lost_at_s: float | None = None
        self._backoff = Backoff(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        self.replica = make()

    def leave(self, why: str) -> None:
        """Its replica takes no more requests, and is let go once those that it has are done."""
        self.replica.leave(why)
        self._left.set()

    async def keep(self) -> None:
        """Knows who is at the address, until they left."""
        try:
            async with self._tasks:
                watching = self._tasks.create_task(self._watch(), name=f"watch {self.address.name}")
                await self._left.wait()
                await self.replica.wait_unused()
                watching.cancel()
                self._stop_loads()
        finally:
            self._seats.succeed(self.replica, None)
            await self._connection.close()

    async def _watch(self) -> None:
        """Asks who is there until it is ready, then listens for the moment when it no longer is."""
        while True:
            pause_s = _LOADING_PAUSE_S
            try:
                await self._meet()
            except StagemeshError as exc:
                pause_s = self._backoff.next_s()
                await self._lose(exc)
            await asyncio.sleep(pause_s)

    async def _meet(self) -> None:
        await self._describe()
        if self.replica.state is ReplicaState.READY:
            _log.info("replica %s is ready", self.replica.name)
            await self._connection.wait_while_serving()
            await self._describe()

    async def _describe(self) -> None:
        said = await self._connection.describe(timeout_s=_DESCRIBE_TIMEOUT_S)
        self._lost_at_s = None
        self._backoff.reset()
        failed = said.state == stage_pb2.REPLICA_STATE_FAILED
        if self.replica.met and self.replica.incarnation != said.incarnation:
            self.replica.end(_ended(self.replica, "was started anew", reason="REPLICA_RESTARTED"))
            self._succeed()
        elif self.replica.gone is not None and not failed:
            self._succeed()
        self._seats.admit(self.replica, said)
        if failed:
            self.replica.end(_ended(self.replica, f"failed ({said.detail})"))
        elif self._loads is None and self.replica.state is not ReplicaState.FAILED:
            self._loads = self._tasks.create_task(self._follow_load(self.replica))

    def _succeed(self) -> None:
        self._stop_loads()
        former, self.replica = self.replica, self._make()
        if self._left.is_set():
            self.replica.leave(former.detail)
        self._seats.succeed(former, self.replica)

    async def _follow_load(self, replica: Replica) -> None:
        """Records each load report.

        A replica without load reports still serves: its health alone says whether it is reachable.
        """
        while True:
            with suppress(StagemeshError):
                async with aclosing(self._connection.loads()) as reports:
                    async for report in reports:
                        replica.record_load(report)
            await asyncio.sleep(_LOAD_AGAIN_S)

    def _stop_loads(self) -> None:
        if self._loads is not None:
            self._loads.cancel()
            self._loads = None

    async def _lose(self, cause: StagemeshError) -> None:
        self._stop_loads()
        self.replica.observe(ReplicaState.UNREACHABLE, cause.message)
        now_s = asyncio.get_running_loop().time()
        if self._lost_at_s is None:
            self._lost_at_s = now_s
        if not self.replica.met or self.replica.gone is not None:
            return
        if await self._connection.nobody_listens():
            self.replica.end(_ended(self.replica, f"is gone ({cause.message})"))
        elif now_s - self._lost_at_s > GIVE_UP_S:
            self.replica.end(_ended(self.replica, f"is out of reach ({cause.message})"), died=False)


def _ended(replica: Replica, what: str, *, reason: str = REPLICA_LOST) -> UnavailableError:
    return UnavailableError(
        f"replica {replica.name} of stage {replica.stage!r} at {replica.endpoint} {what}; try again",
        reason=reason,
        metadata={"stage": replica.stage, "replica": replica.name},
        retry_after_s=1.0,
    )
