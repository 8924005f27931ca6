"""Watches one address: which replica process serves there, whether it is ready, and its load."""

import asyncio
import logging
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import StagemeshError
from stagemesh.common.replica_state import ReplicaState
from stagemesh.common.versions import NO_COMMON_VERSION
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_client import ReplicaClient, Verdict
from stagemesh.orchestrator.membership.base import Member
from stagemesh.v1 import stage_pb2

if TYPE_CHECKING:
    from stagemesh.orchestrator.fleet.fleet import Fleet

_log = logging.getLogger(__name__)

_DESCRIBE_TIMEOUT_S = 2.0
_FIRST_PAUSE_S, _LOADING_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 0.5, 2.0
_LOAD_RETRY_S = 1.0
GIVE_UP_S = 15.0
"""Time in seconds after which an unreachable replica counts as ended."""


class ReplicaWatcher:
    """Watches the replica processes at one address, one after another.

    The watch ends when the member has left and its replica runs no request of this orchestrator.
    """

    def __init__(self, fleet: "Fleet", member: Member, client: ReplicaClient) -> None:
        """Creates a watcher for the address of a member. `client` calls the replica at this address."""
        self._fleet, self._member, self._client = fleet, member, client
        self._left = asyncio.Event()
        self._lost_at_s: float | None = None
        self._backoff = Backoff(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
        self._tasks = asyncio.TaskGroup()
        self._load_reports: asyncio.Task[None] | None = None
        """The task that stores the replica's load reports, or None if no reports are being received."""
        self._verdict = stage_pb2.ROLLOUT_VERDICT_UNSPECIFIED
        """The verdict that was sent with the call for load reports."""
        self.replica = fleet.create_replica(member, client)

    def leave(self, why: str) -> None:
        """Stops planning requests on the replica. The watch ends after the replica's running requests have ended.

        `why` is shown to operators.
        """
        self.replica.leave(why)
        self._left.set()

    async def watch(self) -> None:
        """Watches the address until the member has left and its replica is idle. Then closes the connection."""
        try:
            async with self._tasks:
                watching = self._tasks.create_task(self._watch(), name=f"watch {self.replica.name}")
                await self._left.wait()
                await self.replica.wait_until_idle()
                watching.cancel()
                self._stop_load_reports()
        finally:
            self._fleet.replace(self.replica, None)
            await self._client.close()

    async def _watch(self) -> None:
        """Polls the replica's description until the replica is ready. Runs until it is cancelled.

        After the replica is ready, waits until the replica is no longer ready, and then polls again.
        """
        while True:
            pause_s = _LOADING_PAUSE_S
            try:
                await self._describe()
                if self.replica.can_connect:
                    _log.info("replica %s is ready", self.replica.name)
                    await self._client.wait_while_serving()
                    await self._describe()
            except StagemeshError as exc:
                pause_s = self._backoff.next_s()
                await self._lose(exc)
            await asyncio.sleep(pause_s)

    async def _describe(self) -> None:
        description = await self._client.describe(timeout_s=_DESCRIBE_TIMEOUT_S)
        self._lost_at_s = None
        self._backoff.reset()
        failed = description.state == stage_pb2.REPLICA_STATE_FAILED
        if self.replica.is_described and self.replica.incarnation != description.incarnation:
            self.replica.end(self.replica.loss("restarted", reason="REPLICA_RESTARTED"))
            self._replace()
        elif self.replica.end_cause is not None and not failed:
            self._replace()
        self._fleet.admit(self.replica, description)
        if failed:
            self.replica.end(self.replica.loss(f"failed ({description.detail})"))
        elif self._load_reports is None and self._fleet.is_own_stage(self.replica, description):
            self._receive_load_reports()

    def update_verdict(self) -> None:
        """Calls for load reports again if the verdict that is sent with this call has changed."""
        if self._load_reports is not None and self._verdict != self._fleet.verdict(self.replica):
            self._stop_load_reports()
            self._receive_load_reports()

    def _receive_load_reports(self) -> None:
        self._verdict = self._fleet.verdict(self.replica)
        self._load_reports = self._tasks.create_task(self._record_loads(self.replica, self._verdict))

    def _replace(self) -> None:
        self._stop_load_reports()
        predecessor, self.replica = self.replica, self._fleet.create_replica(self._member, self._client)
        if self._left.is_set():
            self.replica.leave(predecessor.detail)
        self._fleet.replace(predecessor, self.replica)

    async def _record_loads(self, replica: Replica, verdict: Verdict) -> None:
        """Stores the load reports of `replica` until the task is cancelled. A refused replica only receives the
        verdict.

        A replica that sends no load reports can still serve requests. Whether the replica is ready depends on its
        health check.
        """
        while True:
            with suppress(StagemeshError):
                async with aclosing(self._client.watch_load(verdict)) as reports:
                    async for report in reports:
                        if not replica.is_refused:
                            replica.record_load(report)
            await asyncio.sleep(_LOAD_RETRY_S)

    def _stop_load_reports(self) -> None:
        if self._load_reports is not None:
            self._load_reports.cancel()
            self._load_reports = None

    async def _lose(self, cause: StagemeshError) -> None:
        self._stop_load_reports()
        is_refused = cause.reason == NO_COMMON_VERSION
        self.replica.observe(ReplicaState.FAILED if is_refused else ReplicaState.UNREACHABLE, cause.message)
        now_s = asyncio.get_running_loop().time()
        if self._lost_at_s is None:
            self._lost_at_s = now_s
        if not self.replica.is_described or self.replica.end_cause is not None:
            return
        if await self._client.is_port_closed():
            self.replica.end(self.replica.loss(f"terminated ({cause.message})"))
        elif now_s - self._lost_at_s > GIVE_UP_S:
            self.replica.end(self.replica.loss(f"is unreachable ({cause.message})"), died=False)
