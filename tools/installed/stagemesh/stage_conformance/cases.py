"""The cases: their names, levels and places in docs/protocol.md, how one runs, and its verdict."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc

from stagemesh.common.errors import Code, StagemeshError
from stagemesh.rpc.error_mapping import from_rpc_error

if TYPE_CHECKING:
    from stagemesh.stage_conformance.trial import Trial

_Found = TypeVar("_Found")
PEER = "the stage"
MINIMUM, RECOVERY, FURTHER = 1, 2, 3
"""The levels: the minimum profile, CancelStep and RebindStep, and everything else."""


class MismatchError(Exception):
    """Raised if the stage does not do what the protocol says."""

    def __init__(self, expected: str, came: str) -> None:
        super().__init__(f"expected {expected}; came {came}")
        self.expected, self.came = expected, came


class NotServedError(Exception):
    """Raised if the case needs a method that the stage does not serve and need not serve."""


class NotApplicableError(Exception):
    """Raised if the case cannot be played at a stage with this signature. The text says why."""


class Verdict(Enum):
    """The verdict about a case. Only a failure makes the stage fail."""

    PASSED = "passed"
    FAILED = "failed"
    NOT_SERVED = "not served"
    NOT_APPLICABLE = "not applicable"


@dataclass(frozen=True)
class Result:
    """The result of a case."""

    case: "Case"
    verdict: Verdict
    seconds: float
    expected: str = ""
    came: str = ""
    logs: Mapping[str, Sequence[str]] = field(default_factory=dict[str, Sequence[str]])
    """The last events of each step, and messages of each stream and played consumer, of a case that failed."""


class Needs(Enum):
    """An ability of the stage that a case needs: an incoming edge, or an outgoing edge."""

    INPUT = "an incoming edge"
    OUTPUT = "an outgoing edge"


@dataclass(frozen=True)
class Case:
    """A check with a name, which begins with the stage's part: joining, steps, consumer, producer or hostile."""

    name: str
    rule: str
    """The section of docs/protocol.md, and the rule in it."""
    run: Callable[["Trial"], Awaitable[None]]
    level: int = MINIMUM
    needs: frozenset[Needs] = frozenset()
    waits_s: float = 0.0
    """The time for which the case waits, in seconds. Cases that wait long begin first."""
    alone: bool = False
    """Whether the case runs while no other one does, because it disturbs others or finds out whether the process
    survives.
    """

    @property
    def plays(self) -> str:
        """The role that the tool plays in the case."""
        part = self.name.partition(".")[0]
        return {"consumer": "producer", "producer": "consumer", "hostile": "hostile peer"}.get(part, "orchestrator")


_PARTS = ("joining", "steps", "consumer", "producer", "hostile")
CASES: list[Case] = []
"""All cases."""
_Check = TypeVar("_Check", bound=Callable[..., Awaitable[None]])


def case(
    name: str,
    rule: str,
    *needs: Needs,
    level: int = MINIMUM,
    waits_s: float = 0.0,
    alone: bool = False,
    variants: Mapping[str, Any] | None = None,
) -> Callable[[_Check], _Check]:
    """Returns a decorator that adds a case whose check is the decorated function.

    With `variants`, one case for each of them is added, and the function receives its value as the second argument. A
    test vector may state its own level, and its description is a part of the rule.
    """

    def add(check: _Check) -> _Check:
        def bound(value: object) -> Callable[["Trial"], Awaitable[None]]:
            return lambda trial: check(trial, value)

        plain = Case(name, rule, check, level, frozenset(needs), waits_s, alone)
        if variants is None:
            CASES.append(plain)
        for key, value in (variants or {}).items():
            stated = _stated(value)
            own_rule = f"{rule}: {stated['description']}" if "description" in stated else rule
            own_level = stated.get("level", level)
            CASES.append(replace(plain, name=f"{name}.{key}", rule=own_rule, run=bound(value), level=own_level))
        return check

    return add


def _stated(variant: object) -> Mapping[str, Any]:
    """Returns the entries of a variant that is a test vector."""
    return cast("Mapping[str, Any]", variant) if isinstance(variant, dict) else {}


def select(patterns: Sequence[str]) -> list[Case]:
    """Returns the cases whose names match one of the patterns, such as `consumer.*`. All cases if there is none.

    They are in the order of the checklist in docs/protocol.md.
    """
    chosen = [each for each in CASES if not patterns or any(fnmatchcase(each.name, one) for one in patterns)]
    return sorted(chosen, key=lambda each: _PARTS.index(each.name.partition(".")[0]))


def expect(condition: object, expected: str, came: object) -> None:
    """Raises MismatchError if the condition does not hold."""
    if not condition:
        raise MismatchError(expected, str(came))


def expect_equal(what: str, wanted: object, found: object) -> None:
    """Raises MismatchError if the values differ."""
    expect(found == wanted, f"{what} {wanted!r}", repr(found))


def expect_error(error: StagemeshError, code: Code | None, *reasons: str) -> None:
    """Raises MismatchError if an error has another code, or none of the reasons, or no ErrorInfo at all.

    None stands for any code, and no reason for any reason of the stage's own.
    """
    wanted = f"{code.name if code else 'an error'} {' or '.join(reasons)}".strip()
    found = f"{error.code.name} {error.reason}: {error.message}"
    if error.metadata.get("peer") == PEER:
        raise MismatchError(f"{wanted}, with an ErrorInfo", f"{found} (no ErrorInfo)")
    fits = (code is None or error.code is code) and (not reasons or error.reason in reasons)
    expect(fits, wanted, found)


def error_of(failure: grpc.aio.AioRpcError) -> StagemeshError:
    """Returns the error of a failed call. Raises NotServedError if the stage does not serve the method."""
    error = from_rpc_error(failure, peer=PEER)
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED and error.metadata.get("peer") == PEER:
        raise NotServedError from failure
    return error


async def expect_failure(call: Awaitable[object], code: Code | None, *reasons: str) -> StagemeshError:
    """Awaits a call that must fail with this error. Returns the error."""
    try:
        answer = await call
    except grpc.aio.AioRpcError as exc:
        error = error_of(exc)
        expect_error(error, code, *reasons)
        return error
    raise MismatchError(
        f"{code.name if code else 'an error'} {' or '.join(reasons)}".strip(), f"success: {brief(answer)}"
    )


async def answer_of(call: Awaitable[_Found]) -> _Found:
    """Awaits a call that must succeed. Raises NotServedError if the stage does not serve the method."""
    try:
        return await call
    except grpc.aio.AioRpcError as exc:
        error = error_of(exc)
        raise MismatchError("an answer", f"{error.code.name} {error.reason}: {error.message}") from exc


def brief(message: object) -> str:
    """Returns a message as one short line."""
    text = " ".join(str(message).split())
    return text if len(text) <= 160 else f"{text[:160]}…"


class Observed:
    """Something whose messages are logged, and awaited."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self._changed = asyncio.Event()

    def note(self, text: str) -> None:
        """Adds a line to the log, and wakes everything that waits."""
        self.log.append(text)
        self._changed.set()

    async def until(self, find: Callable[[], _Found | None], expected: str, *, within_s: float = 8.0) -> _Found:
        """Waits until `find` returns a true value, and returns it. Raises MismatchError if it does not in time."""
        try:
            async with asyncio.timeout(within_s):
                while not (found := find()):
                    self._changed.clear()
                    await self._changed.wait()
                return found
        except TimeoutError:
            raise MismatchError(f"{expected} within {within_s:g} s", self.came) from None

    @property
    def came(self) -> str:
        """The last lines of the log."""
        return "; ".join(self.log[-6:]) or "nothing"


async def run_case(case: Case, trial: "Trial", *, limit_s: float) -> Result:
    """Runs a case, and cleans up after it."""
    started_s = time.monotonic()

    def result(verdict: Verdict, expected: str = "", came: str = "") -> Result:
        logs: Mapping[str, Sequence[str]] = trial.logs() if verdict is Verdict.FAILED else {}
        return Result(case, verdict, time.monotonic() - started_s, expected, came, logs)

    try:
        _check_needs(case, trial)
        async with trial, asyncio.timeout(limit_s):
            await case.run(trial)
    except MismatchError as exc:
        return result(Verdict.FAILED, exc.expected, exc.came)
    except (NotServedError, NotApplicableError) as exc:
        is_served = isinstance(exc, NotApplicableError)
        return result(Verdict.NOT_APPLICABLE if is_served else Verdict.NOT_SERVED, came=str(exc))
    except TimeoutError:
        return result(Verdict.FAILED, f"an end within {limit_s:g} s", "none")
    except grpc.aio.AioRpcError as exc:
        return result(Verdict.FAILED, "a call that succeeds", f"{exc.code().name}: {exc.details()}")
    except Exception as exc:  # noqa: BLE001 - a stage may answer what no case expects
        return result(Verdict.FAILED, "an answer that the case can read", f"{type(exc).__name__}: {exc}")
    return result(Verdict.PASSED)


def _check_needs(case: Case, trial: "Trial") -> None:
    """Raises NotApplicableError if the stage lacks what the case needs."""
    for each in case.needs:
        if not trial.stage.offers(each):
            raise NotApplicableError(f"the stage lacks {each.value}")


def in_order(cases: Sequence[Case]) -> Iterator[list[Case]]:
    """Yields the groups of cases that may run at the same time: those that need not run alone, and then each other."""
    yield sorted((each for each in cases if not each.alone), key=lambda each: -each.waits_s)
    for each in cases:
        if each.alone:
            yield [each]
