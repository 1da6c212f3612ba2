"""Two searches of `replica_world`: all states of a small scope, or long walks in a large one."""

from __future__ import annotations

from collections import deque
from random import Random
from typing import NamedTuple

from tests.support.worlds.replica_world import Scope, State, Step, check, steps

# Kinds of steps (first word of the name) that a walk chooses less often.
RARE = {"elect": 0.15, "crash": 0.2, "power": 0.3, "append": 0.3, "send": 0.3}


class ExplorationResult(NamedTuple):
    """The result of an exploration."""

    states: int
    broken: str  # the broken invariant with the steps before; empty: all hold
    is_complete: bool  # all states of the scope were visited


def explore(begin: State, scope: Scope, *, states_max: int) -> ExplorationResult:
    """Visit the states, nearest first, up to `states_max`."""
    came_from: dict[int, tuple[int, str]] = {hash(begin): (0, "")}
    waiting = deque([begin])
    while waiting:
        state = waiting.popleft()
        key = hash(state)
        try:
            for name, after in steps(state, scope):
                after_key = hash(after)
                if after_key in came_from:
                    continue
                came_from[after_key] = (key, name)
                check(after)
                waiting.append(after)
        except AssertionError as broken:  # Broken, or an assertion of production
            return ExplorationResult(len(came_from), f"{broken}\n{_trail(came_from, key)}", False)
        if len(came_from) > states_max:
            return ExplorationResult(len(came_from), "", False)
    return ExplorationResult(len(came_from), "", True)


def _trail(came_from: dict[int, tuple[int, str]], key: int) -> str:
    names = []
    while key in came_from:
        key, name = came_from[key]
        names.append(name)
    return "\n".join(reversed(names))


def walk(begin: State, scope: Scope, *, seed: int, length: int) -> ExplorationResult:
    """Take `length` random steps."""
    random, state, names = Random(seed), begin, list[str]()
    try:
        for _ in range(length):
            kinds: dict[str, list[Step]] = {}
            for step in steps(state, scope):
                kinds.setdefault(step[0].partition(" ")[0], []).append(step)
            if not kinds:
                break
            # Choose the kind first: elections are many and would displace the other steps.
            names_of = sorted(kinds)
            weights = [RARE.get(kind, 1.0) for kind in names_of]
            name, state = random.choice(kinds[random.choices(names_of, weights)[0]])
            names.append(name)
            check(state)
    except AssertionError as broken:
        return ExplorationResult(len(names), f"{broken}\n" + "\n".join(names), False)
    return ExplorationResult(len(names), "", True)
