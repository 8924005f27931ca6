"""Faults of a replica or of the orchestrator, each with a check that it happened."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from enum import Enum
from random import Random
from typing import TypeVar

import grpc
import psutil

from stagemesh.conformance import until
from stagemesh.v1 import admin_pb2
from tests.deployment import Deployment
from tests.soak.connections import sever
from tests.soak.operators import Operator

T = TypeVar("T")

STOP_S = 10.0
_EFFECT_TIMEOUT_S = 5.0


class FaultKind(Enum):
    """A kind of fault. The value is its name in reports."""

    KILL = "kill"
    STOP = "stop"
    SEVER = "sever"
    DRAIN = "drain"
    RESTART = "restart"
    KILL_ORCHESTRATOR = "kill-orchestrator"
    SEVER_ORCHESTRATOR = "sever-orchestrator"

    @property
    def is_of_orchestrator(self) -> bool:
        """Whether the fault hits the orchestrator and not a replica."""
        return self in {FaultKind.KILL_ORCHESTRATOR, FaultKind.SEVER_ORCHESTRATOR}

    @property
    def kills(self) -> bool:
        """Whether a process dies of the fault, so that its requests count as hit by a death."""
        return self is FaultKind.KILL


class MissedError(Exception):
    """A fault had no effect, so that the soak proves nothing by it."""


class Faults:
    """Performs the faults of one deployment. Each method returns when the fault is over."""

    def __init__(self, deployment: Deployment, operator: Operator, random: Random, *, load_s: float) -> None:
        """`load_s` is the maximum time for a process to become ready."""
        self._deployment, self._operator, self._random, self._load_s = deployment, operator, random, load_s

    async def perform(self, kind: FaultKind, victim: str) -> None:
        """Performs a fault. Raises MissedError if it had no effect."""
        methods: Mapping[FaultKind, Callable[[str], Awaitable[None]]] = {
            FaultKind.KILL: self._kill,
            FaultKind.STOP: self._stop,
            FaultKind.SEVER: self._sever,
            FaultKind.DRAIN: self._drain,
            FaultKind.RESTART: self._restart,
            FaultKind.KILL_ORCHESTRATOR: self._kill,
            FaultKind.SEVER_ORCHESTRATOR: self._sever,
        }
        await methods[kind](victim)

    async def _kill(self, victim: str) -> None:
        before = self._deployment.process_id(victim)
        psutil.Process(before).kill()
        await self._until_another_process(victim, before)

    async def _stop(self, victim: str) -> None:
        process = psutil.Process(self._deployment.process_id(victim))
        process.suspend()
        try:
            await _until(lambda: process.status() == psutil.STATUS_STOPPED, what="stopped")
            await asyncio.sleep(STOP_S)
        finally:
            process.resume()

    async def _sever(self, victim: str) -> None:
        if sever(self._deployment.process_id(victim)) == 0:
            raise MissedError(f"{victim} had no connection to sever")

    async def _drain(self, victim: str) -> None:
        await self._retry(lambda: self._operator.drain(victim))
        if victim in await self._retry(self._operator.ready):
            raise MissedError(f"{victim} takes requests though it was drained")
        await asyncio.sleep(self._random.uniform(1.0, 4.0))
        await self._retry(lambda: self._operator.resume(victim))

    async def _restart(self, victim: str) -> None:
        before = self._deployment.process_id(victim)
        await self._retry(lambda: self._restart_once(victim, before))
        await self._until_another_process(victim, before)

    async def _restart_once(self, victim: str, before: int) -> None:
        """Restarts the process, unless an aborted call has already done so."""
        if self._deployment.runs(victim, before):
            phases = await self._operator.restart(victim, load_s=self._load_s)
            if phases[-1:] != [admin_pb2.RESTART_PHASE_READY]:
                raise MissedError(f"{victim} was restarted up to phase {phases[-1:]}")

    async def _until_another_process(self, victim: str, before: int) -> None:
        """Waits until `up` has started the process again."""
        await _until(
            lambda: self._deployment.statuses[victim]["process_id"] not in {None, before},
            what="was started again",
            timeout_s=self._load_s,
        )

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Repeats an operator's call if another fault aborts it. A drained replica stays drained."""
        async with asyncio.timeout(self._load_s * 2):
            while True:
                try:
                    return await call()
                except grpc.aio.AioRpcError as exc:
                    if exc.code() is not grpc.StatusCode.UNAVAILABLE:
                        raise
                await asyncio.sleep(0.2)


async def _until(condition: Callable[[], bool], *, what: str, timeout_s: float = _EFFECT_TIMEOUT_S) -> None:
    try:
        await until(condition, timeout_s=timeout_s)
    except TimeoutError:
        raise MissedError(f"the victim never {what}") from None
