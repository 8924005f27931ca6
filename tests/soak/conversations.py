"""A long conversation with a deployment whose stages are killed, and whose user interrupts. It compares what the user
heard, the transcript and the state of the stages.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from stagemesh.client import AsyncClient, AsyncSession, AudioChunk, Client, Text, TurnEnded, TurnInterrupted
from stagemesh.client.session_turns import SessionEvent
from stagemesh.common.errors import NotReadyError
from stagemesh.v1.orchestrator_pb2 import ConverseResponse
from tests.deployment import Deployment
from tests.orchestrator.mesh import poll
from tests.soak.footprint import Sample, growth, sampling
from tests.soak.operators import Operator, operating, unreleased
from tests.system.conversing import joined

_RELEASE_S = 20.0
_WORDS = ("river", "castle", "garden", "mountain", "kitchen", "library", "morning", "winter")


@dataclass(frozen=True)
class ConversationPlan:
    """The plan of a conversation.

    Every `interrupt_every`-th turn is interrupted at a random moment of its answer. A replica dies in every
    `kill_every`-th turn.
    """

    turns: int
    seed: int = 1
    interrupt_every: int = 3
    kill_every: int = 20
    answer_s: float = 1.0
    """The usual duration of an answer in seconds."""
    turn_s: float = 60.0
    """The maximum duration of a turn in seconds, in which a killed process may have to start again."""


class Expected(Protocol):
    """The conversation as its user knows it. `ExpectedConversation` computes the answers of a fake pipeline."""

    def add(self, said: str, *, heard: str) -> None:
        """Adds a turn: what the user said, and what the user heard of the answer."""

    def answer(self, said: str) -> str:
        """Returns the whole answer to the next turn."""
        ...


class RepeatedConversation:
    """A conversation whose answers are those of single requests with all of its messages and the same seed."""

    def __init__(self, client: Client, *, seed: int, **arguments: Any) -> None:
        """`arguments` are those of `Client.generate`."""
        self._client, self._seed, self._arguments = client, seed, arguments
        self._messages: list[tuple[str, str]] = []

    def add(self, said: str, *, heard: str) -> None:
        self._messages += [("user", said), ("assistant", heard)]

    def answer(self, said: str) -> str:
        seed = self._seed + len(self._messages) // 2
        messages = [*self._messages, ("user", said)]
        return self._client.generate(messages=messages, seed=seed, **self._arguments).result().text


@dataclass
class Heard:
    """The events of one turn's answer that the user has received."""

    texts: list[str] = field(default_factory=list[str])
    chunks: list[npt.NDArray[np.float32]] = field(default_factory=list[npt.NDArray[np.float32]])
    stopped: TurnInterrupted | None = None
    ended: TurnEnded | None = None
    late: int = 0
    """The number of outputs after the confirmation of an interruption."""

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def audio(self) -> npt.NDArray[np.float32]:
        return joined(self.chunks)


@dataclass
class ConversationReport:
    """The findings of a conversation."""

    counts: Counter[str] = field(default_factory=Counter[str])
    """The number of turns by their fate, and of kills."""
    problems: list[str] = field(default_factory=list[str])
    silence_s: list[float] = field(default_factory=list[float])
    """The times from interruptions to their confirmations, in seconds."""

    def summary(self) -> str:
        times = sorted(self.silence_s) or [0.0]
        counts = ", ".join(f"{count} {name}" for name, count in sorted(self.counts.items()))
        median_s, p90_s = times[len(times) // 2], times[len(times) * 9 // 10]
        return f"{counts}; silent after {median_s:.3f} s (median), {p90_s:.3f} s (p90), {times[-1]:.3f} s (maximum)"


async def converse(
    up: Deployment,
    plan: ConversationPlan,
    expected: Expected,
    *,
    sound_of: Callable[[str], npt.NDArray[np.float32]] | None,
    **arguments: object,
) -> ConversationReport:
    """Holds a conversation with a running deployment, and returns what was found.

    `sound_of` computes the audio of a text, if it is known. `arguments` are those of `AsyncClient.converse`.
    """
    async with operating(up.admin_endpoint) as operator, AsyncClient(up.endpoint) as client:
        talk = _Talk(up, operator, plan, expected, sound_of)
        async with sampling(up.statuses) as samples, client.converse(**arguments) as session:  # type: ignore[arg-type]
            reading = asyncio.create_task(talk.read(session))
            _watch_wire(session, talk.late)
            for number in range(1, plan.turns + 1):
                async with asyncio.timeout(plan.turn_s):
                    await talk.take_turn(session, number)
        await reading
        await talk.check_end(samples)
        return talk.report


class _Talk:
    def __init__(
        self,
        up: Deployment,
        operator: Operator,
        plan: ConversationPlan,
        expected: Expected,
        sound_of: Callable[[str], npt.NDArray[np.float32]] | None,
    ) -> None:
        self.report, self.late = ConversationReport(), Counter[int]()
        self._up, self._operator, self._plan, self._expected, self._sound_of = up, operator, plan, expected, sound_of
        self._random = Random(plan.seed)
        self._heard: dict[int, Heard] = {}
        self._changed = asyncio.Event()

    async def read(self, session: AsyncSession) -> None:
        """Listens until the session is closed."""
        async for event in session:
            self._note(event)
            self._changed.set()

    async def take_turn(self, session: AsyncSession, number: int) -> None:
        """Says a line, perhaps interrupts the answer, and compares what was heard with what was expected."""
        line = f"turn {number}: {' '.join(self._random.choices(_WORDS, k=4))}"
        killing = None if number % self._plan.kill_every else asyncio.create_task(self._kill())
        await session.append(line)
        turn = await session.commit()
        if number % self._plan.interrupt_every == 0:
            await self._interrupt(session, turn)
        heard = await self._until_ended(turn)
        if killing is not None:
            await killing
        self._check_turn(heard, turn, expected=await asyncio.to_thread(self._expected.answer, line))
        answer = heard.text
        if heard.stopped is not None:
            answer = await self._truncate(session, heard)
            await self._until_released(f"{session.session_id}.{turn}")
        self._expected.add(line, heard=answer)

    async def check_end(self, samples: Sequence[Sample]) -> None:
        """Checks that nothing remains of the conversation. `samples` are the measurements of its processes."""
        await self._until(Deployment.all_ready)
        for held in await unreleased(self._up, self._operator, wait_s=_RELEASE_S):
            self._find(f"{held} remains")
        for problem in growth(samples):
            self._find(problem)
        for turn, count in self.late.items():
            self._find(f"{count} outputs of turn {turn} arrived after its interruption was confirmed")

    # -- the user

    async def _interrupt(self, session: AsyncSession, turn: int) -> None:
        await asyncio.sleep(self._random.uniform(0, self._plan.answer_s))
        asked_s = time.monotonic()
        try:
            await session.interrupt(turn)
        except NotReadyError as exc:
            if exc.reason != "TURN_ENDED":
                raise
            self.report.counts["turns that ended before they were interrupted"] += 1
            return
        self.report.silence_s.append(time.monotonic() - asked_s)
        self.report.counts["interrupted turns"] += 1

    async def _truncate(self, session: AsyncSession, heard: Heard) -> str:
        """Shortens the answer to what was heard of its text, or of its audio. Returns it."""
        assert heard.stopped is not None
        assert heard.ended is not None
        by_audio = self._random.random() < 0.5 and len(heard.audio) > 0
        if not by_audio:
            answer = (await session.truncate()).answer
            if answer != heard.text:
                self._find(f"turn {heard.ended.turn} was shortened to {answer!r}, but {heard.text!r} was heard")
            return answer
        share = self._random.random()
        position = int(share * len(heard.audio))
        answer = (await session.truncate(positions={"audio": position})).answer
        length = position / heard.stopped.positions["audio"] * len(heard.ended.answer)
        if not heard.ended.answer.startswith(answer) or not length - 20 <= len(answer) <= length:
            self._find(f"turn {heard.ended.turn} was shortened to {len(answer)} characters at {length:.1f}")
        return answer

    # -- the faults

    async def _kill(self) -> None:
        await asyncio.sleep(self._random.uniform(0, self._plan.answer_s))
        await self._until(Deployment.all_ready)
        victim = self._random.choice(sorted(self._up.replicas()))
        before = self._up.process_id(victim)
        self._up.kill(victim)
        self.report.counts["killed stages"] += 1
        await self._until(lambda up: not up.runs(victim, before))

    # -- the findings

    def _find(self, problem: str) -> None:
        self.report.problems.append(problem)

    def _note(self, event: SessionEvent) -> None:
        heard = self._heard.setdefault(getattr(event, "turn", 0), Heard())
        match event:
            case Text() | AudioChunk() if heard.stopped is not None:
                heard.late += 1
            case Text():
                heard.texts.append(event.delta)
            case AudioChunk():
                heard.chunks.append(event.samples)
            case TurnInterrupted():
                heard.stopped = event
            case TurnEnded():
                heard.ended = event
            case _:
                pass

    async def _until(self, condition: Callable[[Deployment], bool]) -> None:
        await asyncio.to_thread(self._up.wait, condition, timeout_s=self._plan.turn_s)

    async def _until_ended(self, turn: int) -> Heard:
        while (heard := self._heard.get(turn)) is None or heard.ended is None:
            self._changed.clear()
            await self._changed.wait()
        return heard

    def _check_turn(self, heard: Heard, turn: int, *, expected: str) -> None:
        assert heard.ended is not None
        if heard.ended.error is not None:
            self._find(f"turn {turn} failed: {heard.ended.error}")
        if heard.late:
            self._find(f"{heard.late} events of turn {turn} were delivered after its interruption")
        if not expected.startswith(heard.text):
            self._find(f"turn {turn} was answered with {heard.text!r} instead of {expected!r}")
        if self._sound_of is not None:
            audio, sound = heard.audio, self._sound_of(expected)
            if not np.array_equal(audio, sound[: len(audio)]):
                self._find(f"the audio of turn {turn} differs")
            if heard.stopped is None and len(audio) != len(sound):
                self._find(f"turn {turn} has {len(audio)} samples instead of {len(sound)}")
        if heard.stopped is None:
            self.report.counts["complete turns"] += 1
            if heard.text != expected or heard.ended.answer != expected:
                self._find(f"turn {turn} is incomplete: {heard.text!r}, {heard.ended.answer!r}")

    async def _until_released(self, request_id: str) -> None:
        """Waits until the orchestrator has released the request of an interrupted turn."""
        await poll(self._operator.running, until=lambda running: request_id not in running, timeout_s=_RELEASE_S)


def _watch_wire(session: AsyncSession, late: Counter[int]) -> None:
    """Counts the outputs that arrive at the client after the interruption of their turn, by turn."""
    take, interrupted = session._state.take, set[int]()

    def watched(response: ConverseResponse) -> bool:
        if response.HasField("interrupted"):
            interrupted.add(response.turn)
        elif response.HasField("generated") and response.turn in interrupted:
            late[response.turn] += 1
        return take(response)

    session._state.take = watched  # type: ignore[method-assign]
