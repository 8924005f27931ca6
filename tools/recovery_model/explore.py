"""Explores all states of the model of one request.

python -m tools.recovery_model.explore CRASHES FAULTS [ROWS]

It prints the number of states of a chain of three stages, and the moves to a state that breaks an invariant or from
which the request does not end. CRASHES is the number of processes that may crash, FAULTS the number of further faults,
and ROWS the number of rows of each stage (2). `1 0` takes seconds. Each further crash or fault takes a hundred times
longer.
"""

import sys
from typing import NamedTuple

from tools.recovery_model.orchestrators import Model
from tools.recovery_model.replicas import ViolationError
from tools.recovery_model.states import edge, route_of

CHAIN = route_of(edge("1", "a", "b"), edge("2", "b", "c"))


class Explored(NamedTuple):
    """The result of an exploration."""

    states: int
    trace: list[str]
    """The moves to a state that breaks an invariant or from which the request does not end, and what is wrong there."""


def explore(model: Model, *, crashes: int, faults: int) -> Explored:
    """Explores all states, in the order of their distance from the first one, until one breaks an invariant."""
    states = [model.begin(crashes=crashes, faults=faults)]
    numbers = {states[0]: 0}
    reached_by: list[tuple[int, str]] = [(0, "")]
    before: list[list[int]] = [[]]
    """The states from which each state is reached without a fault."""

    def trace(state: int) -> list[str]:
        moves = list[str]()
        while state:
            state, move = reached_by[state]
            moves.append(move)
        return moves[::-1]

    done = list[int]()
    for state, world in enumerate(states):
        if world.client.is_done:
            done.append(state)
            continue
        try:
            moves = list(model.next(world))
            faulty = list(model.faults(world))
        except ViolationError as exc:
            return Explored(len(states), [*trace(state), str(exc)])
        for number, (move, then) in enumerate((*moves, *faulty)):
            following = numbers.setdefault(then, len(states))
            if following == len(states):
                states.append(then)
                reached_by.append((state, move))
                before.append([])
            if number < len(moves):
                before[following].append(state)
    ending = set(done)
    while done:
        found = [state for state in before[done.pop()] if state not in ending]
        ending.update(found)
        done += found
    hanging = next((state for state in range(len(states)) if state not in ending), None)
    return Explored(len(states), [] if hanging is None else [*trace(hanging), "the request hangs"])


if __name__ == "__main__":
    crashes, faults, rows = map(int, [*sys.argv[1:3], *(sys.argv[3:4] or ["2"])])
    explored = explore(Model(CHAIN, rows=rows), crashes=crashes, faults=faults)
    print(f"{explored.states:,} states", *explored.trace, sep="\n")
    sys.exit(bool(explored.trace))
