"""What became of an attempt to write, as values (failover.md 5).

A swap that was answered is done or refused. One whose answer was lost may still arrive, as long as
the store has the version that it was made from: until then it is PENDING, and its writer reads
again, or makes a swap of its own that changes nothing and so ends it.
"""

from __future__ import annotations

from enum import Enum, auto
from typing import NamedTuple

from tidemill.controller.election.record import GroupRecord


class StoredRecord(NamedTuple):
    """A record, and the store's own word for the version that was read: compared, and no more."""

    record: GroupRecord
    token: str


class WriteAttempt(NamedTuple):
    """A record that somebody tries to write in the place of what was read."""

    base: StoredRecord
    record: GroupRecord  # with a write id of its own


class WriteOutcome(Enum):
    """What became of an attempt."""

    APPLIED = auto()
    OVERTAKEN = auto()  # another write came first: this one never arrives
    PENDING = auto()  # it may arrive yet


def attempt_write(base: StoredRecord, record: GroupRecord, write_id: str) -> WriteAttempt:
    """Return an attempt to write `record`, which was computed from `base`, under its own id."""
    # One more with each write; further only where replicas have seen more than the record has.
    assert record.version > base.record.version, "a write is a version of its own"
    history = record.history
    if record.epoch > base.record.epoch:
        history = (*history[:-1], history[-1]._replace(write_id=write_id))
    return WriteAttempt(base, record._replace(write_id=write_id, history=history))


def attempt_no_change(base: StoredRecord, write_id: str) -> WriteAttempt:
    """Return a write that changes nothing: what was made from the same version cannot arrive."""
    record = base.record._replace(version=base.record.version + 1)
    return attempt_write(base, record, write_id)


def outcome_of(made: WriteAttempt, found: StoredRecord) -> WriteOutcome:
    """Return what became of an attempt, by what is stored now."""
    write_id = made.record.write_id
    if found.record.write_id == write_id or any(
        one.write_id == write_id for one in found.record.history
    ):
        return WriteOutcome.APPLIED
    if found.token == made.base.token:
        return WriteOutcome.PENDING
    # A change of the sets alone that was applied, and overwritten since, is told from one that
    # never arrived by nobody; neither is in force, and both are decided upon anew.
    return WriteOutcome.OVERTAKEN
