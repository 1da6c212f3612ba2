"""The spread of dedup keys (ADR 0091): all orders of events, with two or three owners and one key.

List `v` gives the key to broker group `v % n`, so each spread moves it. Proxies are not modelled
one by one. A proxy may have any list that the home has published, and any request may arrive late
or again, so the model keeps what proxies can send: each request stays possible forever, and a proof
from the time on when its lookup could be answered. A kill takes the uncommitted records of a
broker group. Each mutant leaves out one part of the protocol and must store the key twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

WINDOW = 2  # ticks
TICKS_MAX = 8
FAR = -WINDOW  # a time with a window that is over


class Owner(NamedTuple):
    """The state of a broker group; its list is `version`, and its spread may be open."""

    version: int = 0
    is_open: bool = False
    fenced_at: int = FAR  # when it got the list, in this process
    stored_at: int = FAR  # of the key


class State(NamedTuple):
    """The whole world. `written` is lost by a kill, unless it is committed."""

    written: tuple[Owner, ...]
    committed: tuple[Owner, ...]
    # Per broker group: versions of lookups with the answer "unknown" that wait for a commit.
    answers: tuple[frozenset[int], ...]
    proofs: frozenset[int] = frozenset()  # that a proxy has, by version
    version: int = 0  # at the home
    is_open: bool = False
    now: int = 0
    last_copy: int = FAR  # when the newest committed copy of the message was stored
    copies: int = 0  # of one window


def begin(owners: int, *, version: int = 0, proofs: frozenset[int] = frozenset()) -> State:
    """Return a state without an open spread; all broker groups have the same list."""
    each = (Owner(version=version),) * owners
    return State(each, each, (frozenset(),) * owners, proofs, version)


def changed(values: tuple[Any, ...], at: int, value: Any) -> tuple[Any, ...]:
    """Return the values with one of them replaced."""
    return (*values[:at], value, *values[at + 1 :])


class Protocol:
    """The events, with the parts that a mutant leaves out."""

    has_fence = True  # a lookup stores the list at the old owner
    has_lookup = True  # proxies ask the old owner
    checks_list = True  # a broker group rejects keys that it does not own by its list
    checks_proof_version = True
    commits_fence = True  # the answer to a lookup waits for the commit
    waits_for_window = True  # the spread is open until the keys of the old owner are over
    keeps_fence = True  # an older list of the home does not undo a fence
    waits_for_end = True  # a spread begins only when the one before is closed

    def __init__(self, owners: int, versions_max: int) -> None:
        self.owners = owners
        self.versions_max = versions_max

    def next_states(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield each event that is possible, and the state after it."""
        if state.now < TICKS_MAX:
            yield "tick", state._replace(now=state.now + 1)
        if state.version < self.versions_max and not (self.waits_for_end and state.is_open):
            yield "spread", state._replace(version=state.version + 1, is_open=True)
        for at in range(self.owners):
            yield f"list to {at}", self.deliver(state, at, state.version, is_open=state.is_open)
            if not self.keeps_fence and state.version:
                old = self.deliver(state, at, state.version - 1, is_open=False)
                yield f"old list to {at}", old
            yield f"commit {at}", self.commit(state, at)
            if state.written[at] != state.committed[at] or state.answers[at]:
                yield f"kill {at}", self.kill(state, at)
            # Each proxy may have any list, so a send without a proof may reach any broker group.
            yield f"send to {at}", self.send(state, at, proof=None)
            for version in sorted(state.proofs):
                if version % self.owners == at:
                    yield f"send to {at} with proof {version}", self.send(state, at, proof=version)
            yield f"report of {at}", self.report(state, at)
        for version in range(1, state.version + 1):
            if self.has_lookup:
                yield f"lookup {version}", self.look_up(state, version)
            else:
                yield f"no lookup {version}", state._replace(proofs=state.proofs | {version})

    def deliver(self, state: State, at: int, version: int, *, is_open: bool) -> State:
        """Bring a list to a broker group."""
        owner = state.written[at]
        if self.keeps_fence and version < owner.version:
            return state
        if version == owner.version:
            new = owner._replace(is_open=owner.is_open and is_open)
        else:
            new = owner._replace(version=version, is_open=is_open, fenced_at=state.now)
        return state._replace(written=changed(state.written, at, new))

    def send(self, state: State, at: int, *, proof: int | None) -> State:
        """Send the message to a broker group."""
        owner = state.written[at]
        if state.now < owner.stored_at + WINDOW:
            return state  # The first answer.
        if self.checks_list:
            if owner.version % self.owners != at:
                return state
            is_proven = proof is not None and (
                proof == owner.version or not self.checks_proof_version
            )
            if owner.is_open and not is_proven:
                return state
        new = owner._replace(stored_at=state.now)
        return state._replace(written=changed(state.written, at, new))

    def look_up(self, state: State, version: int) -> State:
        """Ask the old owner for the key, with a list of the home."""
        at = (version - 1) % self.owners
        if self.has_fence and state.written[at].version < version:
            state = self.deliver(state, at, version, is_open=True)
        owner = state.written[at]
        if owner.version > version or state.now < owner.stored_at + WINDOW:
            return state  # The proxy has an old list, or gets the first answer.
        if not self.commits_fence:
            return state._replace(proofs=state.proofs | {version})
        waiting = changed(state.answers, at, state.answers[at] | {version})
        return state._replace(answers=waiting)

    def commit(self, state: State, at: int) -> State:
        """Commit all records of a broker group, and send its answers."""
        before, owner = state.committed[at], state.written[at]
        state = state._replace(
            committed=changed(state.committed, at, owner),
            answers=changed(state.answers, at, frozenset()),
            proofs=state.proofs | state.answers[at],
        )
        if owner.stored_at == before.stored_at:
            return state
        is_same = abs(owner.stored_at - state.last_copy) < WINDOW
        copies = state.copies + 1 if is_same else 1
        return state._replace(last_copy=max(owner.stored_at, state.last_copy), copies=copies)

    def kill(self, state: State, at: int) -> State:
        """Lose the uncommitted records of a broker group.

        The next process counts the window from its start.
        """
        restarted = state.committed[at]._replace(fenced_at=state.now)
        return state._replace(
            answers=changed(state.answers, at, frozenset()),
            written=changed(state.written, at, restarted),
        )

    def report(self, state: State, at: int) -> State:
        """Close the spread if the old owner has no key from before its fence."""
        owner = state.committed[at]
        is_old_owner = state.is_open and at == (state.version - 1) % self.owners
        if not is_old_owner or owner.version != state.version:
            return state
        fenced_at = max(owner.fenced_at, state.written[at].fenced_at)
        if self.waits_for_window and state.now < fenced_at + WINDOW:
            return state
        return state._replace(is_open=False)


def explore(protocol: Protocol, start: State, *, depth: int) -> tuple[list[str], int]:
    """Return the first events after which a message is stored twice, and the number of states."""
    came_from: dict[State, tuple[State, str]] = {}
    seen, ring = {start}, [start]
    for _ in range(depth):
        following = []
        for state in ring:
            for event, after in protocol.next_states(state):
                if after in seen:
                    continue
                seen.add(after)
                came_from[after] = state, event
                if after.copies > 1:
                    return _path(came_from, after), len(seen)
                following.append(after)
        ring = following
    return [], len(seen)


def _path(came_from: dict[State, tuple[State, str]], state: State) -> list[str]:
    events = []
    while state in came_from:
        state, event = came_from[state]
        events.append(event)
    return events[::-1]


# All broker groups have list 2, and a proof of list 1 is still on its way to broker group 1.
LATE_PROOF = begin(2, version=2, proofs=frozenset({1}))


@pytest.mark.parametrize(
    ("owners", "versions_max", "start", "depth"),
    [
        pytest.param(2, 3, begin(2), 12, id="two owners"),
        pytest.param(3, 2, begin(3), 9, id="three owners"),
        pytest.param(2, 3, LATE_PROOF, 11, id="a late proof"),
    ],
)
def test_spread_never_accepts_a_key_twice(
    owners: int, versions_max: int, start: State, depth: int
) -> None:
    found, states = explore(Protocol(owners, versions_max), start, depth=depth)
    assert found == []
    assert states > 10_000


@pytest.mark.parametrize(
    ("part", "start"),
    [
        ("has_fence", begin(2)),
        ("has_lookup", begin(2)),
        ("checks_list", begin(2)),
        ("checks_proof_version", LATE_PROOF),
        ("commits_fence", begin(2)),
        ("waits_for_window", begin(2)),
        ("keeps_fence", begin(2)),
        ("waits_for_end", begin(3)),
    ],
)
def test_a_spread_without_one_part_stores_a_key_twice(part: str, start: State) -> None:
    protocol = Protocol(len(start.written), start.version + 2)
    setattr(protocol, part, False)
    found, _ = explore(protocol, start, depth=10)
    assert found, f"the exploration does not need {part}"
