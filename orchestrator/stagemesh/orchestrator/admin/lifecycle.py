"""Drains, resumes and restarts replicas."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from enum import Enum
from functools import partial
from typing import NamedTuple

from stagemesh.common.errors import DeadlineError, InvalidRequestError, NotReadyError, StagemeshError
from stagemesh.orchestrator.admin.directory import Directory
from stagemesh.orchestrator.fleet.replica import Replica, ReplicaState
from stagemesh.v1 import control_pb2

_CALL_S = 5.0
_POLL_S = 0.1
_DRAIN_S = 300.0
_DRAINED = "drained by an operator"


class RestartPhase(Enum):
    """How far a replica's restart is; the value is the wire's name without its prefix."""

    DRAINING = "DRAINING"
    ENDING = "ENDING"
    STARTING = "STARTING"
    READY = "READY"


class RestartEvent(NamedTuple):
    """A replica's restart has got on."""

    replica: str
    phase: RestartPhase
    running: int


class Lifecycle:
    """That a replica drains is known by itself, so that every orchestrator hears of it; here nothing is kept."""

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        # Of two replicas that are drained at once, each would take the other for the one that is left.
        self._draining = asyncio.Lock()

    async def drain(self, target: str, *, force: bool, move_after_s: float | None = None) -> list[Replica]:
        """Has nothing more planned on the target, and what runs there still after `move_after_s` go on elsewhere.

        Raises NotReadyError (LAST_REPLICA) where no ready replica would be left, unless forced.
        """
        async with self._draining:
            replicas = self._directory.target(target)
            if not force:
                self._check_others(replicas, what="draining")
            # Of a stage, those that serve; what was named alone says itself why it cannot.
            await _each(
                [replica for replica in replicas if len(replicas) == 1 or replica.state is ReplicaState.READY],
                partial(_drain, move_after_s=move_after_s),
            )
            return replicas

    async def wait_idle(self, replicas: Sequence[Replica], *, timeout_s: float) -> None:
        """Returns once nothing runs on them; raises DeadlineError (STILL_RUNNING)."""
        ends_s = asyncio.get_running_loop().time() + timeout_s
        for replica in replicas:
            running = await _left_running(replica, ends_s=ends_s)
            if running:
                raise _still_running(replica, running, "it stays drained")

    async def resume(self, target: str) -> list[Replica]:
        """Has the target planned on again. Of a stage, those replicas that drain."""
        replicas = self._directory.target(target)
        await _each(
            [replica for replica in replicas if len(replicas) == 1 or replica.state is ReplicaState.DRAINING], _resume
        )
        return replicas

    async def restart(self, target: str, *, force: bool, drain_s: float) -> AsyncGenerator[RestartEvent]:
        """Restarts the target, one replica after the other; `drain_s` 0 is 300. Iterate within `aclosing`.

        Raises NotReadyError (LAST_REPLICA), and DeadlineError (STILL_RUNNING) after resuming the replica.
        """
        if not drain_s >= 0:
            raise InvalidRequestError(f"drain_s is {drain_s:g}; it must be 0 for {_DRAIN_S:g}, or more")
        for name in [replica.name for replica in self._directory.target(target)]:
            replica = self._directory.replica(name)
            former = await _incarnation(replica)
            async with self._draining:
                if not force:
                    self._check_others([replica], what="restarting")
                if replica.state is ReplicaState.READY:
                    await _drain(replica)
            async for running in self._drained(replica, force=force, drain_s=drain_s or _DRAIN_S):
                yield RestartEvent(name, RestartPhase.DRAINING, running)
            async for phase in self._started_again(replica, former=former):
                yield RestartEvent(name, phase, 0)

    async def _drained(self, replica: Replica, *, force: bool, drain_s: float) -> AsyncGenerator[int]:
        """How many run still, whenever that changes, until none does or they are to be stopped."""
        told = -1
        ends_s = asyncio.get_running_loop().time() + drain_s
        while running := await count_running(replica):
            if running != told:
                yield running
                told = running
            if asyncio.get_running_loop().time() >= ends_s:
                if force:
                    return
                await _resume(replica)
                raise _still_running(replica, running, f"after {drain_s:g} s; it is resumed")
            await asyncio.sleep(_POLL_S)

    async def _started_again(self, replica: Replica, *, former: str) -> AsyncGenerator[RestartPhase]:
        await _control(replica, "Shutdown", control_pb2.ShutdownRequest().SerializeToString())
        yield RestartPhase.ENDING
        await _until(lambda: self._is_another(replica.name, former))
        yield RestartPhase.STARTING
        await _until(lambda: self._is_ready(replica.name))
        yield RestartPhase.READY

    async def _is_another(self, name: str, former: str) -> bool:
        """Whether another process than the former one answers for a replica."""
        replica = self._directory.find(name)
        if replica is None:
            return False
        try:
            return await _incarnation(replica) != former
        except StagemeshError:
            return False

    async def _is_ready(self, name: str) -> bool:
        replica = self._directory.find(name)
        return replica is not None and replica.state is ReplicaState.READY

    def _check_others(self, replicas: Sequence[Replica], *, what: str) -> None:
        """Raises NotReadyError where replicas of a stage serve, and no other does."""
        if not any(replica.state is ReplicaState.READY for replica in replicas):
            return
        stage, names = replicas[0].stage, {replica.name for replica in replicas}
        others = [replica for replica in self._directory.replicas_of(stage) if replica.name not in names]
        if any(replica.state is ReplicaState.READY for replica in others):
            return
        left = ", ".join(f"{replica.name} is {replica.state.value.lower()}" for replica in others)
        raise NotReadyError(
            f"{what} {', '.join(sorted(names))} would leave stage {stage!r} without a ready replica "
            f"({left or 'it has no other'}): requests that need it would be refused",
            reason="LAST_REPLICA",
            metadata={"stage": stage},
        )


async def _until(done: Callable[[], Awaitable[bool]]) -> None:
    while True:
        if await done():
            return
        await asyncio.sleep(_POLL_S)


async def _each(replicas: Sequence[Replica], act: Callable[[Replica], Awaitable[None]]) -> None:
    """Acts on all, also where one of them fails; raises the first error then."""
    errors: list[StagemeshError] = []
    for replica in replicas:
        try:
            await act(replica)
        except StagemeshError as exc:
            errors.append(exc)
    if errors:
        raise errors[0]


async def _left_running(replica: Replica, *, ends_s: float) -> int:
    """How many requests run once none does, or at `ends_s` of the event loop's time."""
    while True:
        running = await count_running(replica)
        if not running or asyncio.get_running_loop().time() >= ends_s:
            return running
        await asyncio.sleep(_POLL_S)


async def count_running(replica: Replica) -> int:
    """Requests that are planned on a replica or run there, whosever they are.

    One that is out of reach runs nothing; one that does not answer in time may run something, and counts as 1.
    """
    if replica.running:
        return replica.running
    request = control_pb2.ListStepsRequest(page_size=1000)
    try:
        answer = await _control(replica, "ListSteps", request.SerializeToString())
    except DeadlineError:
        return 1
    except StagemeshError:
        return 0
    return len(control_pb2.ListStepsResponse.FromString(answer).steps)


async def _incarnation(replica: Replica) -> str:
    return (await replica.client.describe(timeout_s=_CALL_S)).incarnation


async def _drain(replica: Replica, *, move_after_s: float | None = None) -> None:
    request = control_pb2.DrainRequest(move_after_s=move_after_s)
    await _control(replica, "Drain", request.SerializeToString())
    if replica.state is ReplicaState.READY:
        replica.observe(ReplicaState.DRAINING, _DRAINED)


async def _resume(replica: Replica) -> None:
    await _control(replica, "Resume", control_pb2.ResumeRequest().SerializeToString())
    said = await replica.client.describe(timeout_s=_CALL_S)
    # Of any other only the fleet says whether it is one of ours, and which process.
    if replica.state is ReplicaState.DRAINING and replica.incarnation == said.incarnation:
        replica.observe(ReplicaState.from_wire(said.state), said.detail)


async def _control(replica: Replica, method: str, request: bytes) -> bytes:
    return await replica.client.control(method, request, timeout_s=_CALL_S)


def _still_running(replica: Replica, running: int, then: str) -> DeadlineError:
    what = "1 request runs" if running == 1 else f"{running} requests run"
    return DeadlineError(
        f"{what} still on replica {replica.name}; {then}", reason="STILL_RUNNING", metadata={"replica": replica.name}
    )
