"""One task of a fake stage, step by step."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import numpy as np

from stagemesh.common.errors import (
    CancelledRequestError,
    InternalError,
    InvalidChunkError,
    InvalidRequestError,
    OverloadedError,
)
from stagemesh.common.tensors import Array, Tensors
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.base import Checkpoint, Emission, EngineEvent, Paused, Progress, Task, Usage
from stagemesh.services.engines.fake import signature
from stagemesh.services.engines.fake.distributions import SeededRandom
from stagemesh.services.engines.fake.faults import TaskFaults
from stagemesh.services.engines.fake.options import FakeOptions
from stagemesh.services.engines.fake.outputs import at_step, is_packed, made_of, pack, sized, source_text, unpack
from stagemesh.services.engines.fake.pace import Pace
from stagemesh.services.engines.input_join import packets_of


class FakeRun:
    """Turns each input into an emission, in its time. `events` once."""

    def __init__(self, task: Task, *, stage: str, function: str, options: FakeOptions, closed: asyncio.Event) -> None:
        """`closed` says that the engine gives up."""
        self._task, self._stage, self._function, self._options = task, stage, function, options
        self._signature = signature(function)
        self._dice = SeededRandom(task.seed, stage)
        self._faults = TaskFaults(options.faults, task, self._dice)
        self._closed = closed
        self._resumed = task.resume_from.steps if task.resume_from is not None else 0
        self._rows_behind: dict[str, int] = {}
        """By tensor, the rows that were made before the checkpoint and are to come by again."""
        self._step = 0
        if task.resume_from is not None and task.resume_from.rows and not is_packed(task.resume_from.tensors):
            # The inputs may be cut in other places than before: it is the rows that say where the task was.
            self._resumed, self._rows_behind = 0, dict(task.resume_from.rows)
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
                made = self._rest(made_of(self._function, given))
                if made is None:
                    self._step += 1
                    continue
                await self._compute()
                emission = Emission(Packet(made, {"step": self._step}))
                disordered = self._faults.disorders(self._step)
                self._step += 1
                pauses = self._step - self._resumed == self._task.max_steps or self._task.pause_requested.is_set()
                # What comes late comes before a pause: nobody would emit it afterwards.
                if disordered and not pauses:
                    late.append(emission)
                    continue
                for each in (emission, *late):
                    yield each
                late.clear()
                yield Progress(self._step)
                if self._options.checkpoint_steps and not self._step % self._options.checkpoint_steps:
                    yield Checkpoint(self._step, tensors=at_step(self._step))
                if pauses:
                    left = await self._state(inputs)
                    if left is not None:
                        yield Paused(left)
                        return
        for each in late:
            yield each
        if self._is_behind:
            assert self._task.resume_from is not None, "who begins at the start is not behind"
            raise InvalidRequestError(
                f"stage {self._stage}: the checkpoint is of step {self._task.resume_from.steps}, and all is done at "
                f"{self._step}",
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

    @property
    def _is_behind(self) -> bool:
        """Whether it has yet to come to where it resumes."""
        return self._step < self._resumed or any(self._rows_behind.values())

    def _rest(self, made: Tensors) -> Tensors | None:
        """What of a step's tensors comes after the checkpoint that the task resumes from; None where nothing does."""
        if not any(self._rows_behind.values()):
            return None if self._is_behind else made
        skips = {name: min(len(tensor), self._rows_behind.get(name, 0)) for name, tensor in made.items()}
        for name, skipped in skips.items():
            self._rows_behind[name] = self._rows_behind.get(name, 0) - skipped
        rest = {name: tensor[skips[name] :] for name, tensor in made.items()}
        self._resumed = self._step if any(map(len, rest.values())) else self._step + 1
        return rest if self._resumed == self._step else None

    async def _inputs(self) -> AsyncGenerator[Tensors, None]:
        """What each step works on, from the first one on, or from where a state that was paused left off."""
        if self._is_source:
            for step in range(self._source_steps):
                yield {"text": self._sized(source_text(self._task, step), step)}
            return
        resume_from = self._task.resume_from
        if resume_from is not None and is_packed(resume_from.tensors):
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
        """What is needed to go on, what has yet to come included; None where nothing is left to do.

        Who is asked to pause does not wait for what has yet to come: whoever goes on is fed from the start.
        """
        if self._task.pause_requested.is_set():
            return Checkpoint(self._step, tensors=at_step(self._step))
        if self._is_source:
            return Checkpoint(self._step, tensors=at_step(self._step)) if self._step < self._source_steps else None
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
