"""One task of a fake stage, step by step."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np

from stagemesh.connectors.base import Packet
from stagemesh.connectors.errors import (
    CancelledRequestError,
    InternalError,
    InvalidChunkError,
    InvalidRequestError,
    OverloadedError,
)
from stagemesh.connectors.tensors import Array, Tensors
from stagemesh.services.engines.base import Checkpoint, Emission, EngineEvent, Paused, Progress, Task, Usage
from stagemesh.services.engines.fake import signature
from stagemesh.services.engines.fake.amounts import Dice
from stagemesh.services.engines.fake.contents import made_of, pack, sized, source_text, unpack
from stagemesh.services.engines.fake.faults import TaskFaults
from stagemesh.services.engines.fake.options import FakeOptions
from stagemesh.services.engines.fake.pace import Pace
from stagemesh.services.engines.joining import packets_of


class FakeRun:
    """Turns each input into an emission, in its time. `events` once."""

    def __init__(self, task: Task, *, stage: str, function: str, options: FakeOptions, closed: asyncio.Event) -> None:
        """`closed` says that the engine gives up."""
        self._task, self._stage, self._function, self._options = task, stage, function, options
        self._signature = signature(function)
        self._dice = Dice(task.seed, stage)
        self._faults = TaskFaults(options.faults, task, self._dice)
        self._closed = closed
        self._resumed = task.resume_from.steps if task.resume_from is not None else 0
        self._step = 0
        self._pace = Pace(keeps=self._is_source, clock=asyncio.get_running_loop().time)
        self._memory = hold_memory(0)

    @property
    def left_s(self) -> float:
        """The seconds that it has yet to work, by estimate."""
        expected = self._source_steps if self._is_source else self._options.steps.mean
        return max(0.0, expected - self._step) * self._options.step_s.mean

    async def events(self) -> AsyncGenerator[EngineEvent, None]:
        """See `Engine.submit`."""
        self._memory = hold_memory(self._options.request_memory_bytes)
        size_bytes, late = 0, list[Emission]()
        async with aclosing(self._inputs()) as inputs:
            async for given in inputs:
                size_bytes += sum(tensor.nbytes for tensor in given.values())
                if self._step < self._resumed:
                    self._step += 1
                    continue
                await self._compute()
                emission = Emission(Packet(made_of(self._function, given), {"step": self._step}))
                disordered = self._faults.disorders(self._step)
                self._step += 1
                pauses = self._step - self._resumed == self._task.max_steps
                # What comes late comes before a pause: nobody would emit it afterwards.
                if disordered and not pauses:
                    late.append(emission)
                    continue
                for each in (emission, *late):
                    yield each
                late.clear()
                yield Progress(self._step)
                if self._options.checkpoint_steps and not self._step % self._options.checkpoint_steps:
                    yield Checkpoint(self._step)
                if pauses:
                    left = await self._state(inputs)
                    if left is not None:
                        yield Paused(left)
                        return
        for each in late:
            yield each
        if self._step < self._resumed:
            raise InvalidRequestError(
                f"stage {self._stage}: the checkpoint is of step {self._resumed}, and all is done at {self._step}",
                reason="INVALID_CHECKPOINT",
            )
        yield Usage(prompt_tokens=len(self._task.prompt or ""), output_tokens=size_bytes, steps=self._step)

    @property
    def _is_source(self) -> bool:
        return not self._signature.accepts

    @property
    def _source_steps(self) -> int:
        asked = self._task.sampling.max_tokens
        return self._dice.count(self._options.steps, "steps") if asked is None else asked

    async def _inputs(self) -> AsyncGenerator[Tensors, None]:
        """What each step works on, from the first one on, or from where a state that was paused left off."""
        if self._is_source:
            for step in range(self._source_steps):
                yield {"text": self._sized(source_text(self._task, step), step)}
            return
        resume_from = self._task.resume_from
        if resume_from is not None and resume_from.tensors:
            self._step = self._resumed
            for given in unpack(resume_from.tensors):
                yield given
            return
        step, last = 0, -1
        async with aclosing(packets_of(self._task, self._signature)) as packets:
            async for packet in packets:
                last = self._ordered(packet, last)
                yield {
                    name: self._sized(tensor, step) if name == "text" else tensor
                    for name, tensor in packet.tensors.items()
                }
                step += 1

    def _sized(self, text: Array, step: int) -> Array:
        return sized(text, self._dice.count(self._options.size_bytes, "size", step))

    def _ordered(self, packet: Packet, last: int) -> int:
        """The step that a packet is of, where it says so; raises InvalidChunkError where a later one came before."""
        step = packet.metadata.get("step")
        if not isinstance(step, int) or len(self._task.inlets) > 1:
            return last
        if step < last:
            raise InvalidChunkError(
                f"stage {self._stage}: what its producer made at step {step} came after what it made at step {last}",
                reason="OUT_OF_ORDER",
            )
        return step

    async def _state(self, inputs: AsyncGenerator[Tensors, None]) -> Checkpoint | None:
        """What is needed to go on, what has yet to come included; None where nothing is left to do."""
        if self._is_source:
            return Checkpoint(self._step) if self._step < self._source_steps else None
        left = [{name: np.array(tensor) for name, tensor in given.items()} async for given in inputs]
        return Checkpoint(self._step, tensors=pack(left)) if left else None

    async def _compute(self) -> None:
        """Spends the time of a step, and fails where that is asked for."""
        step = self._step
        await self._faults.strike(step, stage=self._stage)
        await asyncio.sleep(self._pace.pause_s(self._duration_s(step) + self._faults.slowness_s(step)))
        if self._closed.is_set():
            raise CancelledRequestError(f"stage {self._stage} is closing")
        if step == self._options.fail_at_step:
            raise InternalError(f"stage {self._stage} fails at step {step}, as its option fail_at_step asks")

    def _duration_s(self, step: int) -> float:
        first_s = self._options.first_step_s if step == 0 else None
        return self._dice.draw(first_s or self._options.step_s, "duration", step)


def hold_memory(size_bytes: int) -> Array:
    """Memory that is taken as long as somebody holds this; raises OverloadedError where there is not so much."""
    try:
        return np.ones(size_bytes, np.uint8)
    except MemoryError as exc:
        raise OverloadedError(
            f"the fake engine cannot hold {size_bytes} bytes; lower memory_bytes or request_memory_bytes"
        ) from exc
