"""The users that settled dead letters: from the audit log, and from operations."""

from __future__ import annotations

import json

import pytest

from tests.support.audit_changes import AUTHOR
from tests.support.worlds.engine_world import GROUP, TOPIC
from tests.support.worlds.letter_world import LetterWorld
from tidemill.broker.engine.dead_letter.authors import AUDIT_RECORDS_MAX
from tidemill.broker.engine.dead_letter.inspection import (
    AUDIT_RECORDS_A_STEP,
    LETTERS_A_STEP,
    LetterQuery,
    LetterSearch,
)
from tidemill.broker.engine.layout.operation import OperationBegun, OperationKind
from tidemill.broker.engine.metadata.audit_log import AuditedChange

CALL = "POST /groups/{group}/dead-letters:discard"


def change(user: str, group: str = GROUP, *, call: str = CALL, **after: object) -> AuditedChange:
    fields = {**AUTHOR, "user": user, "call": call, "resource": f"Group:{group}"}
    return AuditedChange(fields, after=after)


def world_with(count: int) -> LetterWorld:
    world = LetterWorld()
    world.topic(TOPIC)
    world.dead(*(f"m{n}" for n in range(count)))
    return world


def discard(world: LetterWorld, offset: int, *, user: str = "", operation_id: int = 0) -> None:
    """Discard a dead letter, as a call of a user or a slice of an operation."""
    letters, group = world.engine.dead_letters, world.found_group()
    with world.engine.fold.audited(change(user, state="DISCARDED") if user else None):
        letters.discard(group, [offset], world.now_ms, operation_id=operation_id)
    world.now_ms += 10


def begin(world: LetterWorld, user: str, *, claimed: str = "") -> int:
    """Begin an operation that matches no dead letter; return its id."""
    group = world.found_group()
    topic = world.engine.dead_letters.topic_of(group)
    assert topic is not None
    details = json.dumps({"user": user, "claimedUser": claimed, "filter": {"to_ms": 1}})
    entry = OperationBegun(
        OperationKind.DISCARD, group.id, topic.id, world.now_ms, 0, 9, 9, 1, details
    )
    with world.engine.fold.audited(change(user, kind="DISCARD")):
        return world.engine.fold.append(entry, world.now_ms)


def authors_of(world: LetterWorld) -> list[str]:
    """Return the authors of all settled dead letters, the oldest first."""
    search = LetterSearch(world.engine.letter_inspection, LetterQuery(100))
    while search.step():
        pass
    return [one.settled_by for one in reversed(search.found) if one.settled_at_ms]


def test_an_operation_settles_for_its_starter() -> None:
    world = world_with(4)
    operation_id = begin(world, "alice")
    discard(world, 0, operation_id=operation_id)
    discard(world, 1, user="bob")
    discard(world, 2, operation_id=operation_id)
    discard(world, 3, operation_id=begin(world, "", claimed="carol"))
    assert authors_of(world) == ["alice", "bob", "alice", "carol"]


def test_the_starter_of_a_forgotten_operation_is_unknown() -> None:
    world = world_with(2)
    discard(world, 0, user="bob")
    discard(world, 1, operation_id=77)
    assert authors_of(world) == ["bob", ""]


def test_the_begin_of_an_operation_settles_nothing_itself() -> None:
    world = world_with(3)
    discard(world, 0, user="bob")
    begin(world, "alice")
    discard(world, 1)  # the next round of the same call
    assert authors_of(world) == ["bob", "bob"]


@pytest.mark.parametrize("other", ["group", "call"])
def test_a_call_about_something_else_settles_nothing(other: str) -> None:
    world = world_with(1)
    administration = world.engine.administration
    options = {"group": "other"} if other == "group" else {"call": "POST /groups/{group}:reset"}
    with world.engine.fold.audited(change("eve", **options)):
        administration.put_group("other", now_ms=world.now_ms)
    discard(world, 0)
    assert authors_of(world) == [""]


def test_a_slice_looks_at_a_bounded_number_of_audit_records() -> None:
    world = world_with(LETTERS_A_STEP)
    administration = world.engine.administration
    for n in range(AUDIT_RECORDS_MAX + LETTERS_A_STEP):
        if n >= AUDIT_RECORDS_MAX:
            discard(world, n - AUDIT_RECORDS_MAX)
        with world.engine.fold.audited(change("eve", "other")):
            administration.put_group("other", max_attempts=1 + n % 2, now_ms=world.now_ms)
    search = LetterSearch(world.engine.letter_inspection, LetterQuery(100))
    authors = search._authors
    steps, more = 0, True
    while more:
        before = authors.records_read
        more = search.step()
        assert authors.records_read - before < AUDIT_RECORDS_A_STEP + AUDIT_RECORDS_MAX
        steps += 1
    assert authors.records_read >= LETTERS_A_STEP * AUDIT_RECORDS_MAX // 2
    assert steps > LETTERS_A_STEP // 2
    assert {one.settled_by for one in search.found} == {""}


def test_a_page_repeats_no_search_of_the_audit_log() -> None:
    world = world_with(LETTERS_A_STEP)
    with world.engine.fold.audited(change("eve", "other")):
        world.engine.administration.put_group("other", now_ms=world.now_ms)
    for offset in range(LETTERS_A_STEP):
        discard(world, offset)
    search = LetterSearch(world.engine.letter_inspection, LetterQuery(100))
    while search.step():
        pass
    assert len(search.found) == LETTERS_A_STEP
    assert search._authors.records_read == 1
