"""Drains, resumes and restarts replicas on behalf of AdminService."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from functools import partial

from stagemesh.common.errors import DeadlineError, InvalidRequestError, NotReadyError, StagemeshError
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.orchestrator.admin.directory import CALL_S, Directory
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.v1 import admin_pb2, control_pb2

_POLL_S = 0.1
_DRAIN_S = 300.0
_DRAINED = "drained by an operator"


class Lifecycle:
    """Drains, resumes and restarts the replicas of one pipeline.

    Stores no drain state. Each replica reports whether it is draining, so that every orchestrator sees the state.
    """

    def __init__(self, directory: Directory) -> None:
        self._directory = directory
        # Without this lock, each of two concurrent drains would rely on the other drain's replica to remain ready.
        self._draining = asyncio.Lock()

    async def drain(self, target: str, *, force: bool, move_after_s: float | None = None) -> list[Replica]:
        """Drains a replica or all replicas of a stage, so that these replicas receive no new requests.

        - `target` is the name of the replica or of the stage.
        - `move_after_s` is the time in seconds after which requests that are still running are moved to other replicas.
          If it is None, requests are not moved.

        Returns the replicas. Raises NotReadyError (LAST_REPLICA) if the drain would leave the stage without a ready
        replica, unless `force` is True. Does not wait until the running requests have ended.
        """
        async with self._draining:
            replicas = self._directory.target(target)
            if not force:
                self._check_others(replicas, action="draining")
            await _for_each(replicas, ReplicaState.READY, partial(_drain, move_after_s=move_after_s))
            return replicas

    async def wait_idle(self, replicas: Sequence[Replica], *, timeout_s: float) -> None:
        """Waits until no request runs on any of the replicas.

        Raises DeadlineError (STILL_RUNNING) if requests are still running after `timeout_s` seconds.
        """
        ends_s = asyncio.get_running_loop().time() + timeout_s
        for replica in replicas:
            running = 0
            async for count in _running_counts(replica, ends_s=ends_s):
                running = count
            if running:
                raise _still_running(replica, running, "it remains drained")

    async def resume(self, target: str) -> list[Replica]:
        """Ends the drain of a replica, or of all draining replicas of a stage.

        `target` is the name of the replica or of the stage. Returns the replica, or all replicas of the stage.
        """
        replicas = self._directory.target(target)
        await _for_each(replicas, ReplicaState.DRAINING, _resume)
        return replicas

    async def restart(
        self, target: str, *, force: bool, drain_s: float
    ) -> AsyncGenerator[admin_pb2.RestartReplicasResponse]:
        """Restarts a replica, or all replicas of a stage one after another.

        Yields a message for each change of a replica's restart phase or of its number of running requests. Iterate
        within `aclosing`.

        - `target` is the name of the replica or of the stage.
        - `drain_s` is the time limit for the drain of each replica, in seconds. 0 means 300 seconds.

        Raises NotReadyError (LAST_REPLICA) if the restart would leave the stage without a ready replica. If requests
        are still running on a replica after its drain, resumes the replica and raises DeadlineError (STILL_RUNNING). If
        `force` is True, restarts the replica in both cases.
        """
        if not drain_s >= 0:
            raise InvalidRequestError(f"drain_s is {drain_s:g}; it must be positive, or 0 for {_DRAIN_S:g} s")
        for name in [replica.name for replica in self._directory.target(target)]:
            replica = self._directory.replica(name)
            former = await _incarnation(replica)
            async with self._draining:
                if not force:
                    self._check_others([replica], action="restarting")
                if replica.state is ReplicaState.READY:
                    await _drain(replica)
            running, limit_s = 0, drain_s or _DRAIN_S
            async for running in _running_counts(replica, ends_s=asyncio.get_running_loop().time() + limit_s):
                if running:
                    yield admin_pb2.RestartReplicasResponse(
                        replica=name, phase=admin_pb2.RESTART_PHASE_DRAINING, running=running
                    )
            if running and not force:
                await _resume(replica)
                raise _still_running(replica, running, f"after {limit_s:g} s; it is resumed")
            await replica.client.control(control_pb2.ShutdownRequest(), control_pb2.ShutdownResponse, timeout_s=CALL_S)
            yield admin_pb2.RestartReplicasResponse(replica=name, phase=admin_pb2.RESTART_PHASE_ENDING)
            await _poll(partial(self._is_replaced, name, former))
            yield admin_pb2.RestartReplicasResponse(replica=name, phase=admin_pb2.RESTART_PHASE_STARTING)
            await _poll(partial(self._is_ready, name))
            yield admin_pb2.RestartReplicasResponse(replica=name, phase=admin_pb2.RESTART_PHASE_READY)

    async def _is_replaced(self, name: str, former: str) -> bool:
        """Returns whether a new process serves the replica with this name.

        `former` is the incarnation of the previous process. Returns False if the replica does not answer.
        """
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

    def _check_others(self, replicas: Sequence[Replica], *, action: str) -> None:
        """Raises NotReadyError (LAST_REPLICA) if all ready replicas of a stage are in `replicas`.

        All of `replicas` belong to this stage. Does nothing if none of `replicas` is ready. `action` is the first word
        of the error message, such as "draining".
        """
        if not any(replica.state is ReplicaState.READY for replica in replicas):
            return
        stage, names = replicas[0].stage, {replica.name for replica in replicas}
        others = [replica for replica in self._directory.replicas_of(stage) if replica.name not in names]
        if any(replica.state is ReplicaState.READY for replica in others):
            return
        states = ", ".join(f"{replica.name} is {replica.state.name.lower()}" for replica in others)
        raise NotReadyError(
            f"{action} {', '.join(sorted(names))} would leave stage {stage!r} without a ready replica "
            f"({states or 'it has no other replica'}), and requests that need it would be rejected",
            reason="LAST_REPLICA",
            metadata={"stage": stage},
        )


async def _poll(condition: Callable[[], Awaitable[bool]]) -> None:
    """Evaluates `condition` every _POLL_S seconds. Returns when the condition is true."""
    while not await condition():  # noqa: ASYNC110 - replicas report no event
        await asyncio.sleep(_POLL_S)


async def _for_each(
    replicas: Sequence[Replica], state: ReplicaState, act: Callable[[Replica], Awaitable[None]]
) -> None:
    """Calls `act` with each replica that is in `state`, even if some calls fail. Then raises the first error, if any.

    If `replicas` contains only one replica, calls `act` regardless of the replica's state. If the state is not
    suitable, the replica itself rejects the call and reports the reason.
    """
    errors: list[StagemeshError] = []
    for replica in (each for each in replicas if len(replicas) == 1 or each.state is state):
        try:
            await act(replica)
        except StagemeshError as exc:
            errors.append(exc)
    if errors:
        raise errors[0]


async def _running_counts(replica: Replica, *, ends_s: float) -> AsyncGenerator[int]:
    """Yields the number of requests that run on a replica, and again whenever the number has changed.

    Ends after the number 0, or when the event loop's clock reaches `ends_s`, in seconds.
    """
    last = -1
    while last:
        running = await count_running(replica)
        if running != last:
            yield running
            last = running
        if asyncio.get_running_loop().time() >= ends_s:
            return
        if running:
            await asyncio.sleep(_POLL_S)


async def count_running(replica: Replica) -> int:
    """Returns the number of requests that this orchestrator has placed on a replica.

    If this number is 0, asks the replica for its running steps, and returns their number. These steps may belong to
    other orchestrators. Returns 0 if the replica is unreachable. Returns 1 if the replica does not answer in time,
    because requests may be running there.
    """
    if replica.running:
        return replica.running
    try:
        request = control_pb2.ListStepsRequest(page_size=1000)
        return len((await replica.client.control(request, control_pb2.ListStepsResponse, timeout_s=CALL_S)).steps)
    except DeadlineError:
        return 1
    except StagemeshError:
        return 0


async def _incarnation(replica: Replica) -> str:
    return (await replica.client.describe(timeout_s=CALL_S)).incarnation


async def _drain(replica: Replica, *, move_after_s: float | None = None) -> None:
    request = control_pb2.DrainRequest(move_after_s=move_after_s)
    await replica.client.control(request, control_pb2.DrainResponse, timeout_s=CALL_S)
    if replica.state is ReplicaState.READY:
        replica.observe(ReplicaState.DRAINING, _DRAINED)


async def _resume(replica: Replica) -> None:
    await replica.client.control(control_pb2.ResumeRequest(), control_pb2.ResumeResponse, timeout_s=CALL_S)
    await replica.observe_again(ReplicaState.DRAINING, timeout_s=CALL_S)


def _still_running(replica: Replica, running: int, result: str) -> DeadlineError:
    requests = "1 request still runs" if running == 1 else f"{running} requests still run"
    return DeadlineError(
        f"{requests} on replica {replica.name}; {result}", reason="STILL_RUNNING", metadata={"replica": replica.name}
    )
