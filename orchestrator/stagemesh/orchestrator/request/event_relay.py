"""Follows one step at its replica, over connections that break."""

import asyncio
from contextlib import suppress

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import InternalError, StagemeshError, UnavailableError
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.stage_client import REPLICA_LOST
from stagemesh.orchestrator.fleet.step_stream import TakeEvent
from stagemesh.v1 import stage_pb2

ACCEPT_S = 5.0
"""How long a replica has to take a step."""
REATTACH_S = 2.0
"""How long a replica may be out of reach before its steps are taken elsewhere; less than it keeps them for us."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.4


async def follow_step(replica: Replica, request: bytes, *, stage: str, deadline_s: float, take: TakeEvent) -> None:
    """Gives `take` a step's events, accepted first, each once, to its end. `deadline_s` is in the loop's time, and the
    request is serialized: it is kept to the end, and takes several times as much as a message.

    The step is called again where the connection broke. Raises what it failed with, or what `take` raised;
    UnavailableError (NOT_ACCEPTED) where it was not taken in time, (REPLICA_LOST) where its replica stays out of reach.
    """
    loop = asyncio.get_running_loop()
    ear, broken_s = _EventRelay(take, stage=stage), 0.0
    backoff = Backoff(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
    while True:
        try:
            async with asyncio.timeout(ACCEPT_S) as ear.accepting:
                ear.heard = 0
                asked = stage_pb2.ExecuteStepRequest.FromString(request)
                running = replica.client.execute(asked, timeout_s=max(0.0, deadline_s - loop.time()), take=ear.hear)
                del asked
                await running
        except TimeoutError as exc:
            raise _not_accepted(replica, stage=stage) from exc
        except StagemeshError as exc:
            if exc.reason != REPLICA_LOST:
                raise
            if ear.heard:
                broken_s = 0.0
                backoff.reset()
            broken_s = broken_s or loop.time()
            if replica.gone is not None or loop.time() - broken_s >= REATTACH_S:
                raise
            await asyncio.sleep(backoff.next_s())
            await _check_same(replica, stage=stage, timeout_s=max(0.0, broken_s + REATTACH_S - loop.time()))
        else:
            ear.check_heard()
            return
        finally:
            # A clock knows its task, and one that is cancelled would hold itself by these frames.
            ear.accepting = None


class _EventRelay:
    """Passes a step's events on, each once, over calls that tell them from the first one."""

    def __init__(self, take: TakeEvent, *, stage: str) -> None:
        self._take, self._stage = take, stage
        self._passed = 0
        self.heard = 0
        """Of the call that runs."""
        self.accepting: asyncio.Timeout | None = None
        """The clock that its first event stops."""

    def hear(self, event: stage_pb2.ExecuteStepResponse) -> None:
        """An event of this call."""
        self.heard += 1
        if self.accepting is not None:
            if event.WhichOneof("event") != "accepted":
                raise self._unaccepted()
            self.accepting.reschedule(None)
            self.accepting = None
        if self.heard > self._passed:
            self._passed = self.heard
            self._take(event)

    def check_heard(self) -> None:
        """Raises where the call ended without anything."""
        if not self.heard:
            raise self._unaccepted()

    def _unaccepted(self) -> InternalError:
        return InternalError(f"stage {self._stage!r} did not say that it accepted the request; see its log")


def _not_accepted(replica: Replica, *, stage: str) -> UnavailableError:
    return UnavailableError(
        f"stage {stage!r} (replica {replica.name} at {replica.endpoint}) did not take the request within "
        f"{ACCEPT_S:.0f} s; try again, and see its log",
        reason="NOT_ACCEPTED",
    )


async def _check_same(replica: Replica, *, stage: str, timeout_s: float) -> None:
    """Raises where another process serves at the address by now: it knows nothing of the step, and would begin it."""
    with suppress(StagemeshError):
        said = await replica.client.describe(timeout_s=timeout_s)
        if said.incarnation != replica.incarnation:
            restarted = UnavailableError(
                f"replica {replica.name} of stage {stage!r} at {replica.endpoint} was started anew under the request",
                reason="REPLICA_RESTARTED",
                metadata={"stage": stage, "replica": replica.name},
            )
            replica.end(restarted)
    if replica.gone is not None:
        raise replica.gone
