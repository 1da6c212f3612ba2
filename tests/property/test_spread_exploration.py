"""The spread of dedup keys (ADR 0091): all orders of events, with two or three owners and one key.

List `v` gives the key to broker group `v % n`, so each spread moves it. Some lists have no owner:
deduplication is off. The list after such a list turns it on again. Proxies are not modelled one by
one. A proxy may have any list that the home has published, and any request may arrive late or
again, so the model keeps what proxies can send: each request stays possible forever, and a proof
from the time on when its lookup could be answered. A kill takes the uncommitted records of a
broker group. While deduplication is off, an operator may remove a killed broker group and add it
again: the home no longer waits for it. It gets no request until the home has its report, or a list
makes it the owner. Each mutant leaves out one part of the protocol. It must store the key twice, or
answer a send as the repeat of a message from before deduplication was off, which loses the message.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    stored_by: int = 0  # list with which the key was stored


class State(NamedTuple):
    """The whole world. `written` is lost by a kill, unless it is committed."""

    written: tuple[Owner, ...]
    committed: tuple[Owner, ...]
    # Per broker group: versions of lookups with the answer "unknown" that wait for a commit.
    answers: tuple[frozenset[int], ...]
    proofs: frozenset[int] = frozenset()  # that a proxy has, by version
    version: int = 0  # at the home
    waits_for: frozenset[int] = frozenset()  # broker groups that have not reported to the home
    removed: frozenset[int] = frozenset()  # and added again, without a report since then
    offs: frozenset[int] = frozenset()  # lists without an owner
    now: int = 0
    last_copy: int = FAR  # when the newest committed copy of the message was stored
    copies: int = 0  # of one window, since deduplication was turned on last
    is_lost: bool = False  # a send got the answer of a message from before the last list in `offs`

    @property
    def is_open(self) -> bool:
        """Whether the home waits for reports."""
        return bool(self.waits_for)

    @property
    def is_on(self) -> bool:
        """Whether deduplication is on at the home."""
        return self.version not in self.offs

    def since(self, version: int) -> int:
        """Return the last list without an owner before a list: the start of its deduplication."""
        return max((off for off in self.offs if off < version), default=0)

    def is_spread(self, version: int) -> bool:
        """Whether a list has an old owner."""
        return not self.offs & {version, version - 1}


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
    forgets_keys = True  # a broker group without deduplication has no keys
    waits_for_off = True  # deduplication is turned on only when all reports of its end have arrived
    waits_for_old_owner = True  # also for that of the owners before an open spread
    reports_committed = True  # a report tells only what a kill cannot undo
    forgets_other_start = True  # a broker group with a list of another start has no older keys
    waits_for_removed = True  # a list begins only when those that were added again have reported

    def __init__(self, owners: int, versions_max: int, offs_max: int = 0) -> None:
        self.owners = owners
        self.versions_max = versions_max
        self.offs_max = offs_max

    def next_states(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield each event that is possible, and the state after it."""
        if state.now < TICKS_MAX:
            yield "tick", state._replace(now=state.now + 1)
        if state.version < self.versions_max:
            yield from self.change_list(state)
        for at in range(self.owners):
            yield f"list to {at}", self.deliver(state, at, state.version, is_open=state.is_open)
            if not self.keeps_fence and state.version:
                old = self.deliver(state, at, state.version - 1, is_open=False)
                yield f"old list to {at}", old
            yield f"commit {at}", self.commit(state, at)
            if state.written[at] != state.committed[at] or state.answers[at]:
                yield f"kill {at}", self.kill(state, at)
            yield f"report of {at}", self.report(state, at)
            if not state.is_on and at in state.waits_for:
                waits_for, removed = state.waits_for - {at}, state.removed | {at}
                killed = self.kill(state, at)
                yield f"remove {at}", killed._replace(waits_for=waits_for, removed=removed)
            if at in state.removed and state.version % self.owners != at:
                continue
            # Each proxy may have any list, so a send without a proof may reach any broker group.
            yield f"send to {at}", self.send(state, at, proof=None)
            for version in sorted(state.proofs):
                if version % self.owners == at:
                    yield f"send to {at} with proof {version}", self.send(state, at, proof=version)
        for version in range(1, state.version + 1):
            if not state.is_spread(version):
                continue
            if self.has_lookup:
                yield f"lookup {version}", self.look_up(state, version)
            else:
                yield f"no lookup {version}", state._replace(proofs=state.proofs | {version})

    def change_list(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield the events in which an operator writes a new list at the home."""
        owner, version = state.version % self.owners, state.version + 1
        if self.waits_for_removed and state.removed & {version % self.owners}:
            return
        if not state.is_on:
            if not (self.waits_for_off and state.is_open):
                # Older copies do not count any more.
                on = state._replace(version=version, waits_for=frozenset(), last_copy=FAR, copies=0)
                yield "on", on
            return
        if not (self.waits_for_end and state.is_open):
            yield "spread", state._replace(version=version, waits_for=frozenset({owner}))
        if len(state.offs) < self.offs_max:
            waits_for = {owner} | (state.waits_for if self.waits_for_old_owner else set())
            offs = state.offs | {version}
            yield "off", state._replace(version=version, waits_for=frozenset(waits_for), offs=offs)

    def deliver(self, state: State, at: int, version: int, *, is_open: bool) -> State:
        """Bring a list to a broker group."""
        owner = state.written[at]
        if self.keeps_fence and version < owner.version:
            return state
        if version == owner.version:
            new = owner._replace(is_open=owner.is_open and is_open)
        else:
            new = owner._replace(version=version, is_open=is_open, fenced_at=state.now)
        is_off = version in state.offs and self.forgets_keys
        is_on = not state.offs & {version, owner.version}
        is_other = is_on and state.since(version) != state.since(owner.version)
        if is_off or (is_other and self.forgets_other_start):
            new = new._replace(stored_at=FAR, stored_by=0)
        return state._replace(written=changed(state.written, at, new))

    def repeat(self, state: State, owner: Owner) -> State:
        """Answer a send with the first answer of the key at a broker group."""
        is_old = any(owner.stored_by < off for off in state.offs)
        return state._replace(is_lost=True) if is_old and state.is_on else state

    def send(self, state: State, at: int, *, proof: int | None) -> State:
        """Send the message to a broker group."""
        owner = state.written[at]
        if owner.version in state.offs:
            return state  # It is stored without a key.
        if state.now < owner.stored_at + WINDOW:
            return self.repeat(state, owner)
        if self.checks_list:
            if owner.version % self.owners != at:
                return state
            is_proven = proof is not None and (
                proof == owner.version or not self.checks_proof_version
            )
            if owner.is_open and not is_proven:
                return state
        new = owner._replace(stored_at=state.now, stored_by=owner.version)
        return state._replace(written=changed(state.written, at, new))

    def look_up(self, state: State, version: int) -> State:
        """Ask the old owner for the key, with a list of the home."""
        at = (version - 1) % self.owners
        owner = state.written[at]
        if at in state.removed or owner.version in state.offs:
            return state  # It has no list, so the proxy gets no proof.
        if self.has_fence and owner.version < version:
            state = self.deliver(state, at, version, is_open=True)
        owner = state.written[at]
        if owner.version > version:
            return state  # The proxy has an old list.
        if state.now < owner.stored_at + WINDOW:
            return self.repeat(state, owner)
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
        if owner.stored_at == before.stored_at or owner.stored_at == FAR or not state.is_on:
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
        """Report to the home that a broker group has no key from before the list of the home."""
        owner = state.committed[at] if self.reports_committed else state.written[at]
        if owner.version != state.version:
            return state
        state = state._replace(removed=state.removed - {at})
        if at not in state.waits_for:
            return state
        fenced_at = max(owner.fenced_at, state.written[at].fenced_at)
        if state.is_on and self.waits_for_window and state.now < fenced_at + WINDOW:
            return state
        return state._replace(waits_for=state.waits_for - {at})


def stores_twice(state: State) -> bool:
    """Whether two messages with the key are stored within a window (D-5)."""
    return state.copies > 1


def loses(state: State) -> bool:
    """Whether a message with a free key was not stored (D-4)."""
    return state.is_lost


def explore(
    protocol: Protocol, start: State, *, depth: int, breaks: Callable[[State], bool]
) -> tuple[list[str], int]:
    """Return the first events that break the guarantee, and the number of states."""
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
                if breaks(after):
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
    ("owners", "versions_max", "offs_max", "start", "depth"),
    [
        pytest.param(2, 3, 0, begin(2), 12, id="two owners"),
        pytest.param(3, 2, 0, begin(3), 9, id="three owners"),
        pytest.param(2, 3, 0, LATE_PROOF, 11, id="a late proof"),
        pytest.param(2, 4, 1, begin(2), 11, id="two owners, off and on"),
        pytest.param(3, 3, 1, begin(3), 9, id="three owners, off and on"),
        pytest.param(2, 6, 1, LATE_PROOF, 10, id="a late proof, off and on"),
    ],
)
def test_spread_never_accepts_a_key_twice(
    owners: int, versions_max: int, offs_max: int, start: State, depth: int
) -> None:
    found, states = explore(
        Protocol(owners, versions_max, offs_max),
        start,
        depth=depth,
        breaks=lambda state: stores_twice(state) or loses(state),
    )
    assert found == []
    assert states > 10_000


@pytest.mark.parametrize(
    ("part", "start", "breaks"),
    [
        ("has_fence", begin(2), stores_twice),
        ("has_lookup", begin(2), stores_twice),
        ("checks_list", begin(2), stores_twice),
        ("checks_proof_version", LATE_PROOF, stores_twice),
        ("commits_fence", begin(2), stores_twice),
        ("waits_for_window", begin(2), stores_twice),
        ("keeps_fence", begin(2), stores_twice),
        ("waits_for_end", begin(3), stores_twice),
        ("forgets_keys", begin(2), loses),
        ("waits_for_off", begin(2), loses),
        ("waits_for_off", begin(3), stores_twice),
        ("waits_for_old_owner", begin(2), loses),
        ("reports_committed", begin(2), loses),
        ("forgets_other_start", begin(3), loses),
        ("waits_for_removed", begin(2), loses),
    ],
)
def test_a_spread_without_one_part_breaks_the_guarantee(
    part: str, start: State, breaks: Callable[[State], bool]
) -> None:
    protocol = Protocol(len(start.written), start.version + 3, offs_max=1)
    setattr(protocol, part, False)
    found, _ = explore(protocol, start, depth=10, breaks=breaks)
    assert found, f"the exploration does not need {part}"
