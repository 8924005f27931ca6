"""Injects faults whose kind, victim and time follow from a seed. Measures the pauses of the requests that they hit."""

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from random import Random

import grpc

from tests.deployment import Deployment
from tests.soak.delivery import Delivery
from tests.soak.faults import FaultKind, Faults, MissedError
from tests.soak.load import Load
from tests.soak.operators import Operator
from tests.soak.report import UNTOUCHED

PAUSE_S = (0.5, 3.5)
"""Seconds between two faults."""
MAX_DEATHS = 2
"""The number of deaths that a request may suffer. After two it runs alone, and a third death would rightly fail it."""
_AT_WORK_S = 0.3
_AIM_S = 0.03
"""The pause between two searches for a stage that is at work."""
_AIM_LIMIT_S = 60.0
"""The time after which a search without success ends, so that the soak can end in time."""


@dataclass(frozen=True)
class HitRequest:
    """A request that a fault hit, and the output of the stage that it hit."""

    delivery: Delivery
    output: str
    at_s: float
    usual: Delivery | None
    """The delivery of an equal request without a fault."""

    def pause_s(self) -> float | None:
        """Seconds for which its client waited longer than usual, or None if the output was complete."""
        if not self.delivery.whole():
            return None
        usual = self.usual.outputs[self.output] if self.usual is not None else None
        own = self.delivery.outputs[self.output]
        # Another answer, because of another batch, has its parts at other times.
        is_same = usual is not None and own.size_bytes == usual.size_bytes
        return own.pause_s(self.at_s, usual=usual if is_same else None)


class Injector:
    """Injects faults into one deployment under load."""

    def __init__(
        self,
        deployment: Deployment,
        operator: Operator,
        load: Load,
        *,
        kinds: Sequence[FaultKind],
        seed: int,
        output_of: Mapping[str, str],
        load_s: float,
        hits: int = 0,
        most_at_once: int = 1,
    ) -> None:
        """`output_of` maps each stage to the output in which a client sees that the stage continues. `load_s` is the
        maximum time for a process to become ready. If `hits` is given, faults hit only replicas that are at work on a
        request whose client receives its output just then, until each kind has hit this number of requests. From one to
        `most_at_once` processes are hit at the same time.
        """
        self.counts = Counter[FaultKind]()
        self.missed = list[str]()
        self.struck = dict[str, list[HitRequest]]()
        """The requests that were hit, by kind of fault. UNTOUCHED has requests that ran elsewhere during a fault."""
        self._deployment, self._operator, self._load = deployment, operator, load
        self._kinds, self._random = kinds, Random(seed)
        self._faults = Faults(deployment, operator, Random(seed + 1), load_s=load_s)
        self._output_of, self._load_s, self._hits, self._most_at_once = output_of, load_s, hits, most_at_once
        self.blows = Counter[int]()
        """The number of times that faults hit, by the number of processes that they hit at the same time."""
        self._ill = set[str]()
        """The replicas on which a fault is in progress."""
        self._deaths = Counter[str]()

    async def run(self, *, count: int, stop_s: float) -> None:
        """Injects a number of faults, or as many as there is time for. Returns when the last fault is over."""
        end_s, kinds = time.monotonic() + stop_s, self._random_kinds()
        kind = next(kinds, None)
        async with asyncio.TaskGroup() as group:
            while kind is not None and sum(self.counts.values()) < count and time.monotonic() < end_s:
                await asyncio.sleep(self._random.uniform(*PAUSE_S))
                blow, size = dict[str, FaultKind](), self._random.randint(1, self._most_at_once)
                while kind is not None and len(blow) < size and (victim := await self._find_victim(kind)) is not None:
                    self._ill.add(victim)
                    blow[victim] = kind
                    kind = next(kinds, None)
                # All requests are noted before the first fault. The faults therefore begin at the same time.
                for victim, fault in blow.items():
                    await self._note_hits(fault, victim)
                if blow:
                    self.blows[len(blow)] += 1
                for victim, fault in blow.items():
                    group.create_task(self._inject(fault, victim))

    def _random_kinds(self) -> Iterator[FaultKind]:
        """Yields kinds in random order, each as often as the others. With `hits`, ends when there are enough."""
        while kinds := [kind for kind in self._kinds if not self._has_hits(kind)]:
            yield from self._random.sample(kinds, len(kinds))

    def _has_hits(self, kind: FaultKind) -> bool:
        return bool(self._hits) and len(self.struck.get(kind.value, ())) >= self._hits

    async def _inject(self, kind: FaultKind, victim: str) -> None:
        try:
            await self._faults.perform(kind, victim)
            self.counts[kind] += 1
            await self._wait_until_ready(victim)
        except (MissedError, TimeoutError, AssertionError) as exc:
            # The peer of the only connection of a replica may have been killed at the same time.
            if self._most_at_once == 1 or not (kind is FaultKind.SEVER and isinstance(exc, MissedError)):
                self.missed.append(f"{kind.value} of {victim}: {exc!r}")
        except grpc.aio.AioRpcError as exc:
            # The orchestrator rightly refuses to drain the last ready replica of a stage.
            if self._most_at_once == 1 or exc.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                self.missed.append(f"{kind.value} of {victim}: {exc.code().name} {exc.details()}")
        finally:
            self._ill.discard(victim)

    async def _find_victim(self, kind: FaultKind) -> str | None:
        """Returns the victim. With `hits`, waits for a stage that is at work. Returns None if there is none."""
        if not self._hits:
            return await self._victim(kind)
        with suppress(TimeoutError):
            async with asyncio.timeout(_AIM_LIMIT_S):
                while (victim := await self._victim(kind)) is None:
                    await asyncio.sleep(_AIM_S)
                return victim
        return None

    async def _victim(self, kind: FaultKind) -> str | None:
        """Returns the victim: never the last healthy replica of its stage if one process is hit at a time.

        Returns None if there is none now.
        """
        if kind.is_of_orchestrator:
            return None if "orchestrator" in self._ill else "orchestrator"
        try:
            return await self._replica_for(kind)
        except grpc.aio.AioRpcError:
            return None

    async def _replica_for(self, kind: FaultKind) -> str | None:
        well = {name: stage for name, stage in (await self._operator.ready()).items() if name not in self._ill}
        others = Counter(well.values())
        candidates = sorted(name for name, stage in well.items() if others[stage] > 1 or self._most_at_once > 1)
        self._random.shuffle(candidates)
        if self._hits:
            candidates = [each for each in candidates if await self._is_at_work(each)]
        for candidate in candidates:
            if not kind.kills or await self._may_die(candidate):
                return candidate
        return None

    async def _is_at_work(self, replica: str) -> bool:
        output = self._output_of[replica.rpartition("-")[0]]
        busy = [request for request, delivery in self._load.running.items() if _arrives(delivery, output)]
        return bool(busy) and not set(busy).isdisjoint(await self._operator.running(replica))

    async def _may_die(self, replica: str) -> bool:
        return all(self._deaths[request] < MAX_DEATHS for request in await self._operator.running(replica))

    async def _note_hits(self, kind: FaultKind, victim: str) -> None:
        if kind.is_of_orchestrator:
            for delivery in self._load.running.values():
                self._note(kind.value, delivery, "text")
            return
        try:
            stage, requests = victim.rpartition("-")[0], await self._operator.running(victim)
        except grpc.aio.AioRpcError:
            return
        for request in requests:
            self._deaths[request] += kind.kills
        for request, delivery in self._load.running.items():
            self._note(kind.value if request in requests else UNTOUCHED, delivery, self._output_of[stage])

    def _note(self, kind: str, delivery: Delivery, output: str) -> None:
        # For a request that has not started yet, or waits for another reason, the pause cannot be measured.
        if _arrives(delivery, output):
            hit = HitRequest(delivery, output, time.monotonic(), self._load.first(delivery.request))
            self.struck.setdefault(kind, []).append(hit)

    async def _wait_until_ready(self, victim: str) -> None:
        """Waits until the victim accepts requests again."""
        if victim == "orchestrator":
            # The replicas may be in any state: some have faults of their own.
            await asyncio.to_thread(
                self._deployment.wait,
                lambda up: up.statuses["orchestrator"]["state"] == "ready",
                timeout_s=self._load_s,
            )
            return
        async with asyncio.timeout(self._load_s):
            while not await self._is_ready(victim):
                await asyncio.sleep(0.2)

    async def _is_ready(self, victim: str) -> bool:
        try:
            return victim in await self._operator.ready()
        except grpc.aio.AioRpcError:
            return False


def _arrives(delivery: Delivery, output: str) -> bool:
    """Returns whether the client has just received a part of an output."""
    times_s = delivery.outputs[output].times_s
    return bool(times_s) and time.monotonic() - times_s[-1] < _AT_WORK_S
