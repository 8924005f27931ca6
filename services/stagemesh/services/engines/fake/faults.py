"""What goes wrong with one task."""

import asyncio
import os
import signal
from collections.abc import Sequence

from stagemesh.common.errors import InternalError
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.fake.distributions import SeededRandom
from stagemesh.services.engines.fake.options import Fault, FaultKind


class TaskFaults:
    """The faults that strike one attempt of a request, by the steps that are done before."""

    def __init__(self, faults: Sequence[Fault], task: Task, dice: SeededRandom) -> None:
        self._dice = dice
        self._struck = {
            number: (fault, dice.count(fault.after_steps, "after", number, task.attempt))
            for number, fault in enumerate(faults)
            if fault.attempts == 0 or task.attempt <= fault.attempts
            if dice.quantile("fault", number, task.attempt) < fault.probability
        }

    def disorders(self, step: int) -> bool:
        """Whether the outputs of this step and of the next come in each other's place."""
        return bool(self._now("disorder", step))

    def slowness_s(self, step: int) -> float:
        """What this step takes longer."""
        return sum(
            self._dice.draw(fault.slow_s, "slow", number, step)
            for number, (fault, after) in self._struck.items()
            if fault.kind == "slow" and step >= after
        )

    async def strike(self, step: int, *, stage: str) -> None:
        """Fails, hangs or ends the process, where that is to happen before this step."""
        if self._now("exit", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._now("hang", step):
            await asyncio.Event().wait()
        if self._now("error", step):
            raise InternalError(f"stage {stage} fails at step {step}, as its option faults asks", reason="FAKE_FAULT")

    def _now(self, kind: FaultKind, step: int) -> bool:
        return any(fault.kind == kind and step == after for fault, after in self._struck.values())
